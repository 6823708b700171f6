//! Selection of the next request to a member.

use std::time::Instant;

use zerocopy::{FromZeros, IntoBytes};

use super::tables::Tables;
use super::{EthernetManager, Member, PortRecord};
use crate::vnic::MANAGEMENT_QKEY;
use crate::vnic::wire::attr::{
    IfaceMacsHeader, MAX_MAC_ENTRIES, MacTableEntry, MacTableHeader, Path, PathsHeader, id,
};
use crate::vnic::wire::mad::{ClassPortInfo, method};

/// Request to be sent.
pub(super) struct Request {
    pub(super) method: u8,
    pub(super) attr: u16,
    pub(super) vport: u8,
    pub(super) data: Vec<u8>,
    /// Number of table entries in the request, and the digest of their table.
    pub(super) sent_entries: (usize, u32),
}

impl Request {
    fn get(attr: u16, vport: u8, data: &[u8]) -> Self {
        Self {
            method: method::GET,
            ..Self::set(attr, vport, data)
        }
    }

    fn set(attr: u16, vport: u8, data: &[u8]) -> Self {
        Self {
            method: method::SET,
            attr,
            vport,
            data: data.to_vec(),
            sent_entries: (0, 0),
        }
    }
}

impl EthernetManager {
    /// Returns the next request that brings a member closer to its desired state.
    pub(super) fn plan(&self, index: usize, now: Instant) -> Option<Request> {
        let member = &self.members[index];
        if !member.is_claimed {
            let address = self.config.address;
            let info = ClassPortInfo {
                trap_gid: address.gid.0,
                // Any LID: traps are routed by GID and queue pair.
                trap_lid: 1.into(),
                trap_hl_qp: address.qpn.into(),
                trap_qkey: MANAGEMENT_QKEY.into(),
                ..FromZeros::new_zeroed()
            };
            return Some(Request::set(id::CLASS_PORT_INFO, 0, info.as_bytes()));
        }
        (0..member.ports.len()).find_map(|vport| self.plan_port(member, vport, now))
    }

    fn plan_port(&self, member: &Member, vport: usize, now: Instant) -> Option<Request> {
        let (port, number) = (&member.ports[vport], vport as u8);
        let tables = &self.tables[vport];
        if port.end.is_none() {
            return Some(Request::get(id::END_POINT, number, &[]));
        }
        let is_due = port
            .polled
            .is_none_or(|polled| polled + self.config.interval <= now);
        let info = port.info.as_ref().filter(|_| !is_due);
        let Some(info) = info else {
            return Some(Request::get(id::VESWPORT_INFO, number, &[]));
        };
        if !self.is_configured(member, vport) {
            let wanted = self.config.vesws[vport].port(member.lid?);
            return Some(Request::set(id::VESWPORT_INFO, number, wanted.as_bytes()));
        }
        if port.paths != Some(tables.paths_digest) {
            return Some(self.plan_paths(port, number, tables));
        }
        if port.macs_of != Some(info.vport.uc_macs_gen_count.get()) {
            let header = IfaceMacsHeader {
                start_idx: (port.reading.len() as u16).into(),
                ..FromZeros::new_zeroed()
            };
            return Some(Request::get(
                id::IFACE_UCAST_MACS,
                number,
                header.as_bytes(),
            ));
        }
        if info.vport.mac_tbl_digest.get() != tables.digest {
            return Some(self.plan_table(port, number, tables));
        }
        None
    }

    /// Returns whether a port has the desired configuration.
    pub(super) fn is_configured(&self, member: &Member, vport: usize) -> bool {
        let (Some(info), Some(lid)) = (member.ports[vport].info, member.lid) else {
            return false;
        };
        let mut wanted = self.config.vesws[vport].port(lid);
        let (wanted_port, port) = (&mut wanted.vport, &info.vport);
        wanted_port.eth_link_status = port.eth_link_status;
        wanted_port.oper_state = port.oper_state;
        wanted_port.max_mac_tbl_ent = port.max_mac_tbl_ent;
        wanted_port.max_smac_ent = port.max_smac_ent;
        wanted_port.mac_tbl_digest = port.mac_tbl_digest;
        wanted_port.uc_macs_gen_count = port.uc_macs_gen_count;
        wanted_port.mc_macs_gen_count = port.mc_macs_gen_count;
        wanted == info
    }

    /// Returns the next entry to send, which is the first one if the table has changed.
    pub(super) fn next_entry(port: &PortRecord, digest: u32) -> usize {
        port.sending
            .filter(|(of, _)| *of == digest)
            .map_or(0, |(_, next)| next)
    }

    fn plan_paths(&self, port: &PortRecord, vport: u8, tables: &Tables) -> Request {
        let first = Self::next_entry(port, tables.paths_digest).min(tables.paths.len());
        let most = (self.room() - size_of::<PathsHeader>()) / size_of::<Path>();
        let part = &tables.paths[first..tables.paths.len().min(first + most)];
        let header = PathsHeader {
            offset: (first as u16).into(),
            num_entries: (part.len() as u16).into(),
            total: (tables.paths.len() as u16).into(),
            reserved: 0.into(),
        };
        let data = [header.as_bytes(), part.as_bytes()].concat();
        Request {
            sent_entries: (part.len(), tables.paths_digest),
            ..Request::set(id::PATHS, vport, &data)
        }
    }

    fn plan_table(&self, port: &PortRecord, vport: u8, tables: &Tables) -> Request {
        let first = Self::next_entry(port, tables.digest);
        let most = (self.room() - size_of::<MacTableHeader>()) / size_of::<MacTableEntry>();
        let end = Self::table_end(port, tables);
        let last = end.min(first + most);
        let entry = |n| tables.entries.get(n).copied().unwrap_or_default();
        let part: Vec<_> = (first..last).map(entry).collect();
        // Only the last part contains the digest, so that a port reports a partially received
        // table.
        let digest = if last == end { tables.digest } else { 0 };
        let header = MacTableHeader {
            offset: (first as u16).into(),
            num_entries: (part.len() as u16).into(),
            mac_tbl_digest: digest.into(),
        };
        let data = [header.as_bytes(), part.as_bytes()].concat();
        Request {
            sent_entries: (part.len(), tables.digest),
            ..Request::set(id::VESWPORT_MAC_ENTRIES, vport, &data)
        }
    }

    /// Returns the number of entries to send, including empty entries that clear obsolete entries
    /// of the port.
    pub(super) fn table_end(port: &PortRecord, tables: &Tables) -> usize {
        let filled = port.filled.unwrap_or(MAX_MAC_ENTRIES.into());
        tables.entries.len().max(filled)
    }
}
