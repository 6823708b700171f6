//! Who may log in, and what they may see.

use std::net::SocketAddr;

use riser_scsi::iscsi::keys::{Key, Offer};
use riser_scsi::iscsi::login::{Identity, Joined, Refusal, Terms};
use riser_scsi::iscsi::name::{Found, IscsiName, TargetAddress};
use riser_scsi::iscsi::pdu::LoginStatus;
use riser_scsi::nexus::{Nexus, PortName, TargetPort};

use super::super::Shared;
use super::super::registry::ChannelRef;
use super::super::target::{Catalog, IscsiDef, TargetDef};
use super::sessions::{Entered, SessionKey};
use crate::iscsi::{Admitted, Gate};

/// Longest data segment that we take, in bytes.
const MAX_RECV_SEGMENT: u32 = 256 << 10;

/// Longest burst, in bytes.
const MAX_BURST: u32 = 1 << 20;

/// Unsolicited data of a command at most, in bytes.
const FIRST_BURST: u32 = 64 << 10;

/// R2Ts of a command at once.
const MAX_OUTSTANDING_R2T: u32 = 8;

/// Decides about the logins of one connection.
pub(super) struct WorkerGate<'a> {
    pub(super) shared: &'a Shared,
    pub(super) catalog: &'a Catalog,
    /// The portal.
    pub(super) listen: SocketAddr,
    pub(super) peer: SocketAddr,
    pub(super) channel: ChannelRef,
    pub(super) entered: &'a mut Option<Entered>,
    /// Channels whose session has been taken over.
    pub(super) terminate: &'a mut Vec<ChannelRef>,
}

/// What we agree on.
fn offer() -> Offer {
    Offer::default()
        .with(Key::MaxRecvDataSegmentLength, MAX_RECV_SEGMENT)
        .with(Key::MaxBurstLength, MAX_BURST)
        .with(Key::FirstBurstLength, FIRST_BURST)
        .with(Key::MaxOutstandingR2T, MAX_OUTSTANDING_R2T)
        .with(Key::InitialR2T, 0)
        .with(Key::DefaultTime2Wait, 0)
        .with(Key::DefaultTime2Retain, 0)
        .with_list(Key::HeaderDigest, 0b11)
        .with_list(Key::DataDigest, 0b11)
}

impl<'a> WorkerGate<'a> {
    fn address(&self) -> std::net::IpAddr {
        self.peer.ip().to_canonical()
    }

    /// The target that listens here under a name, its portal group, and its place.
    fn target(&self, name: &IscsiName) -> Option<(usize, &'a TargetDef, u16)> {
        let mut targets = self.catalog.targets.iter().enumerate();
        targets.find_map(|(place, target)| {
            let iscsi = target.iscsi.as_ref().filter(|iscsi| iscsi.name == *name)?;
            let mut portals = iscsi.portals.iter();
            let (_, group) = portals.find(|(listen, _)| *listen == self.listen)?;
            Some((place, target, *group))
        })
    }
}

impl Gate for WorkerGate<'_> {
    fn admit(&mut self, identity: &Identity) -> Result<Terms, Refusal> {
        let refuse = |status| Err(Refusal::Status(status));
        let Some(name) = identity.target.as_ref().filter(|_| !identity.discovery) else {
            return Ok(Terms {
                offer: offer(),
                auth: self.shared.iscsi.discovery.clone(),
                portal_group: 1,
            });
        };
        let Some((place, target, group)) = self.target(name) else {
            return refuse(LoginStatus::NOT_FOUND);
        };
        if target
            .luns_of_name(&identity.initiator, self.address())
            .is_none()
        {
            return refuse(LoginStatus::AUTHORIZATION_FAILURE);
        }
        if identity.tsih.0 != 0 {
            let key = SessionKey::of(identity, place);
            let known = self.shared.iscsi.sessions.is_known(&key, identity.tsih);
            return refuse(if known {
                LoginStatus::TOO_MANY_CONNECTIONS
            } else {
                LoginStatus::NO_SUCH_SESSION
            });
        }
        let iscsi = target.iscsi.as_ref().expect("found by its name");
        Ok(Terms {
            offer: offer(),
            auth: iscsi.auth.clone(),
            portal_group: group,
        })
    }

    fn join(&mut self, joined: &Joined) -> Result<Admitted, LoginStatus> {
        let identity = &joined.identity;
        let sessions = &self.shared.iscsi.sessions;
        let address = self.address();
        let nexus = self.shared.registry.open_nexus(address);
        let nexus = nexus.ok_or(LoginStatus::OUT_OF_RESOURCES)?;
        let name = identity.target.as_ref().filter(|_| !identity.discovery);
        let found = name.and_then(|name| self.target(name));
        let luns = found
            .as_ref()
            .and_then(|(_, target, _)| target.luns_of_name(&identity.initiator, address));
        let entered = Entered {
            // A discovery session concerns no target; its own channel tells it apart.
            key: SessionKey::of(identity, found.as_ref().map_or(usize::MAX, |found| found.0)),
            channel: self.channel,
            nexus,
            address,
            luns: luns.clone(),
        };
        let (tsih, taken_over) = sessions.enter(&entered);
        self.terminate.extend(taken_over);
        if let (Some(luns), Some((_, target, group))) = (&luns, found) {
            let iscsi = target.iscsi.as_ref().expect("found by its name");
            for (_, unit) in luns.iter() {
                unit.lu.add_nexus(nexus, ports(identity, iscsi, group));
            }
        }
        tracing::info!(
            peer = %self.peer, initiator = %identity.initiator, isid = %identity.isid,
            target = name.map_or("discovery", |name| name.as_str()), nexus = nexus.0, tsih = tsih.0,
            "logged in"
        );
        *self.entered = Some(entered);
        Ok(Admitted {
            tsih,
            nexus: luns.map(|luns| (nexus, luns)),
        })
    }

    fn random(&mut self, out: &mut [u8]) {
        getrandom::fill(out).expect("the system has random numbers");
    }

    fn targets(&mut self, initiator: &IscsiName, wanted: Option<&IscsiName>) -> Vec<Found> {
        let address = self.address();
        let targets = self.catalog.targets.iter();
        let visible = targets.filter_map(|target| {
            let iscsi = target.iscsi.as_ref()?;
            target.luns_of_name(initiator, address)?;
            wanted
                .is_none_or(|name| iscsi.name == *name)
                .then(|| Found {
                    name: iscsi.name.clone(),
                    addresses: iscsi
                        .portals
                        .iter()
                        .map(|(listen, group)| TargetAddress::new(*listen, *group))
                        .collect(),
                })
        });
        visible.collect()
    }
}

/// The ports of a nexus, with their names (RFC 7143 4.4.4).
fn ports(identity: &Identity, iscsi: &IscsiDef, group: u16) -> Nexus {
    Nexus {
        initiator: PortName::Iscsi(format!("{},i,{}", identity.initiator, identity.isid)),
        target: TargetPort {
            name: PortName::Iscsi(format!("{},t,0x{group:04x}", iscsi.name)),
            relative_id: group,
            group: 0,
        },
    }
}
