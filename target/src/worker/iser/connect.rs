//! Connection requests, device objects, and teardown for iSER connections.

use std::net::SocketAddr;

use riser_memory::Memory;
use riser_scsi::iser::CmHeader;
use riser_transport::verbs::{CmId, ConnParam};

use crate::iser::{ConnState, IserChannel, IserConfig, IserParams};
use crate::sessions::budget::counted_address;
use crate::sessions::unconfirmed::{self, Unconfirmed};
use crate::worker::conns::ConnKey;
use crate::worker::fabrics::{Fabric, Input, IserConn, Login};
use crate::worker::gate::{ConnAddrs, Transport};
use crate::worker::login_log::Reason;
use crate::worker::rdma::{Hardware, Queues, RdmaLink, Regions, SetupError, max_sge, reads};
use crate::worker::{Phase, Worker};

/// Our offer: responses can invalidate a key, and buffers use addresses.
const OFFER: CmHeader = CmHeader {
    zero_based: false,
    remote_invalidate: true,
};

/// Maximum number of connections that are not established. They already have rings, and can be
/// requested by anyone with a forged address.
const UNCONFIRMED: usize = 64;

/// Maximum number of established connections before login.
const LOGINS: usize = 64;

/// Maximum number of established connections before login for a single address.
const LOGINS_PER_ADDRESS: usize = 16;

impl Worker {
    /// Handles a connection request on the portal with address `listen`.
    pub(in crate::worker) fn on_iser_request(
        &mut self,
        device: usize,
        cm: CmId,
        listen: SocketAddr,
        peer: SocketAddr,
        param: &ConnParam,
    ) {
        // We need two for each session: if it is replaced, the previous connection is still in use
        // until all its commands have left the devices.
        let most = 2 * self.group.catalog.limits.sessions as usize + UNCONFIRMED + LOGINS;
        // Do this first, so that forged requests can't reach the limit below.
        self.make_room_for_request();
        let has_room = self.group.conns.isers().count() < most;
        let accepted = if self.phase == Phase::Serving && has_room {
            self.accept_iser(device, cm, listen, peer, param)
                .map_err(|error| error.to_string())
        } else {
            Err("too many connections".to_owned())
        };
        if let Err(error) = accepted {
            let transport = Transport::Iser;
            let place = ConnAddrs {
                transport,
                listen,
                peer,
            };
            let who = place.nobody();
            let reason = Reason::OUT_OF_RESOURCES;
            self.group
                .logins
                .refuse(self.group.now, &who, reason, Some(&error));
            let dev = &mut self.group.devices[device];
            // The peer may have canceled the request. In this case, we don't have to reply.
            let _ = dev.reject(cm, &[]);
            let _ = dev.destroy_id(cm);
        }
    }

    /// Closes a connection that is not established if there are too many of them.
    fn make_room_for_request(&mut self) {
        let all = self.group.conns.isers_in(&[ConnState::Init]);
        if all.len() >= UNCONFIRMED
            && let Some(key) = unconfirmed::displaceable(&all)
        {
            self.group.input(key, Input::Terminate);
            self.group.drain_dirty();
        }
    }

    /// Called when a connection is established. If there are too many connections before login, one
    /// of them is closed. This ensures that they can't block new connections.
    pub(in crate::worker) fn on_iser_established(&mut self, key: ConnKey) {
        let Some(conn) = self.group.conns.iser_mut(key) else {
            return;
        };
        conn.rdma.was_established = true;
        let Some(conn) = self.group.conns.get(key) else {
            return;
        };
        let address = counted_address(conn.peer.ip());
        self.group.with_iser(key, IserChannel::handle_established);
        let mut all = self
            .group
            .conns
            .isers_in(&[ConnState::Up, ConnState::Bound]);
        let is_from_there = |one: &Unconfirmed<ConnKey>| counted_address(one.address) == address;
        // If there are too many from this address, close one of these. Connections from a different
        // address are only affected if the total is too large.
        if all.iter().filter(|one| is_from_there(one)).count() > LOGINS_PER_ADDRESS {
            all.retain(is_from_there);
        } else if all.len() <= LOGINS {
            return;
        }
        if let Some(key) = unconfirmed::displaceable(&all) {
            self.group.input(key, Input::Terminate);
        }
    }

    /// Creates the channel and accepts the connection.
    fn accept_iser(
        &mut self,
        device: usize,
        cm: CmId,
        listen: SocketAddr,
        peer: SocketAddr,
        param: &ConnParam,
    ) -> Result<(), SetupError> {
        // A feature can only be used if it's offered by both sides.
        let agreed = OFFER.and(CmHeader::parse(&param.private_data));
        let reads = reads(param);
        let attr = self.group.devices[device].device_attr();
        let params = IserParams {
            max_sge: max_sge(attr),
            reads: reads.into(),
            remote_invalidate: agreed.remote_invalidate,
            data_out_timeout: self.group.catalog.data_out_timeout,
            ..IserParams::new(self.group.catalog.commands)
        };
        let memory = params.memory();
        // The rings are allocated with their full size, but pages are only used when messages are
        // received. A peer can't increase their size.
        let receive_ring = Memory::sparse(memory.receive_ring)?.whole();
        let send_ring = Memory::sparse(memory.send_ring)?.whole();
        let queues = Queues {
            receives: params.receives(),
            sends: params.send_queue,
            max_sge: params.max_sge,
        };
        let regions = Regions {
            receive_ring: &receive_ring,
            send_ring: &send_ring,
            pool: self.group.pool.memory(),
        };
        let hardware = Hardware::make(&mut self.group.devices[device], cm, queues, regions)?;
        let serial = self.group.conns.take_serial();
        let config = IserConfig {
            params,
            worker: self.group.index,
            serial,
            receive_ring,
            send_ring,
        };
        let conn = IserConn {
            channel: IserChannel::new(config, self.group.now),
            rdma: RdmaLink::new(device, cm, hardware),
            login: Login::at(listen),
        };
        let fabric = Fabric::Iser(Box::new(conn));
        // Do this before sending the reply, so that all subsequent events and completions find the
        // connection.
        let key = self.group.conns.insert(serial, peer, fabric);
        self.accept(key, param, &agreed.bytes())?;
        tracing::debug!(
            %peer, channel = serial, memory = memory.total(),
            invalidate = agreed.remote_invalidate, "connection accepted"
        );
        Ok(())
    }
}
