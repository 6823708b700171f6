//! Requests for connections, what a connection has at its device, and the end of both.

use std::net::SocketAddr;

use riser_memory::Memory;
use riser_scsi::iser::CmHeader;
use riser_transport::verbs::{CmId, ConnParam};

use super::Conn;
use crate::config::Protocol;
use crate::fabric::MAX_SGE;
use crate::iser::{ConnState, IserChannel, IserConfig, IserParams};
use crate::worker::armed::Armed;
use crate::worker::iscsi::gate::{Connected, Transport};
use crate::worker::session::{INITIATOR_DEPTH, Queues, RESPONDER_RESOURCES, SetupError};
use crate::worker::unconfirmed::{self, Unconfirmed};
use crate::worker::{Endpoint, LINGER, Phase, Worker};

/// What we offer: an answer may invalidate a key. Buffers have addresses.
const OFFER: CmHeader = CmHeader {
    zero_based: false,
    remote_invalidate: true,
};

/// Connections that have not been established. Each has its rings already, and anyone can request
/// one from a forged address.
const UNCONFIRMED: usize = 64;

/// Connections that are established and have not logged in.
const LOGINS: usize = 64;

/// The same from one address.
const LOGINS_PER_ADDRESS: usize = 16;

impl Worker {
    /// A peer asks for a connection on the portal at `listen`.
    pub(in crate::worker) fn on_iser_request(
        &mut self,
        device: usize,
        cm: CmId,
        listen: SocketAddr,
        peer: SocketAddr,
        param: &ConnParam,
    ) {
        let most = 2 * self.catalog.limits.sessions as usize + UNCONFIRMED + LOGINS;
        self.make_room_for_request();
        let has_room = self.isers.conns.len() < most;
        let accepted = if self.phase == Phase::Serving && has_room {
            self.accept_iser(device, cm, listen, peer, param)
                .map_err(|error| error.to_string())
        } else {
            Err("too many connections".to_owned())
        };
        if let Err(error) = accepted {
            let transport = Transport::Iser;
            let place = Connected {
                transport,
                listen,
                peer,
            };
            let who = place.nobody();
            self.audit
                .denied(self.now, &who, "out_of_resources", Some(&error));
            self.rejects.count((Protocol::Iser, "out_of_resources"));
            let dev = &mut self.devices[device];
            // The peer may have given up meanwhile; then there is nobody to tell.
            let _ = dev.reject(cm, &[]);
            let _ = dev.destroy_id(cm);
        }
    }

    /// Ends a connection that has not been established, if there are too many of them.
    fn make_room_for_request(&mut self) {
        let all = self.isers.in_state(&[ConnState::Init]);
        if all.len() >= UNCONFIRMED
            && let Some(key) = unconfirmed::displaceable(&all)
        {
            self.with_iser(key, IserChannel::handle_terminate);
            self.drain_dirty();
        }
    }

    /// A connection is established. Where too many have not logged in, one of them gives way: those that
    /// do not log in keep no others from it.
    pub(in crate::worker) fn on_iser_established(&mut self, key: usize) {
        let Some(conn) = self.isers.conns.get_mut(key) else {
            return;
        };
        conn.was_established = true;
        let address = conn.peer.ip().to_canonical();
        self.with_iser(key, IserChannel::handle_established);
        let mut all = self.isers.in_state(&[ConnState::Up, ConnState::Bound]);
        let is_from_there = |one: &Unconfirmed<usize>| one.address == address;
        if all.iter().filter(|one| is_from_there(one)).count() > LOGINS_PER_ADDRESS {
            all.retain(is_from_there);
        } else if all.len() <= LOGINS {
            return;
        }
        if let Some(key) = unconfirmed::displaceable(&all) {
            self.with_iser(key, IserChannel::handle_terminate);
        }
    }

    /// Makes the channel and accepts the connection.
    fn accept_iser(
        &mut self,
        device: usize,
        cm: CmId,
        listen: SocketAddr,
        peer: SocketAddr,
        param: &ConnParam,
    ) -> Result<(), SetupError> {
        let agreed = OFFER.and(CmHeader::parse(&param.private_data));
        let reads = INITIATOR_DEPTH.min(param.initiator_depth);
        let attr = self.devices[device].device_attr();
        let params = IserParams {
            max_sge: (attr.max_sge as usize).min(MAX_SGE),
            reads: reads.into(),
            remote_invalidate: agreed.remote_invalidate,
            data_out_timeout: self.catalog.data_out_timeout,
            ..IserParams::new(self.catalog.commands)
        };
        let memory = params.memory();
        let receive_ring = Memory::new(memory.receive_ring)?.whole();
        let send_ring = Memory::new(memory.send_ring)?.whole();
        let queues = Queues {
            receives: params.receives(),
            sends: params.send_queue,
            max_sge: params.max_sge,
        };
        let hardware = self.make_hardware(device, cm, queues, [&receive_ring, &send_ring])?;
        let serial = self.take_serial();
        let config = IserConfig {
            params,
            worker: self.index,
            serial,
            receive_ring,
            send_ring,
        };
        let cq = hardware.cq;
        let key = self.isers.conns.insert(Conn {
            channel: IserChannel::new(config, self.now),
            serial,
            device,
            cm,
            hardware,
            listen,
            peer,
            entered: None,
            armed: Armed::default(),
            waits_for_pool: false,
            is_ready: false,
            is_closed: false,
            was_established: false,
            is_leaving: false,
        });
        self.by_cm.insert((device, cm), Endpoint::Iser(key));
        self.by_cq.insert((device, cq), Endpoint::Iser(key));
        // The receives must be there before the peer may send.
        self.pump_iser(key);
        let answer = ConnParam {
            private_data: agreed.bytes().to_vec(),
            responder_resources: RESPONDER_RESOURCES.min(param.responder_resources),
            initiator_depth: reads,
            flow_control: true,
            retry_count: 7,
            rnr_retry_count: 7,
            srq: false,
        };
        if let Err(error) = self.devices[device].accept(cm, &answer) {
            let mut conn = self.isers.conns.remove(key);
            conn.channel.abandon(&mut self.pool);
            self.forget_iser(key, &conn);
            self.destroy_hardware(device, &conn.hardware);
            return Err(error.into());
        }
        tracing::debug!(
            %peer, channel = serial, memory = memory.total(),
            invalidate = agreed.remote_invalidate, "connection accepted"
        );
        Ok(())
    }

    /// Takes a connection out of the worker's tables.
    fn forget_iser(&mut self, key: usize, conn: &Conn) {
        self.by_cm.remove(&(conn.device, conn.cm));
        self.by_cq.remove(&(conn.device, conn.hardware.cq));
        self.ready.retain(|&place| place != Endpoint::Iser(key));
    }

    /// The channel holds nothing any more.
    pub(super) fn release_iser(&mut self, key: usize) {
        let conn = self.isers.conns.remove(key);
        self.forget_iser(key, &conn);
        self.destroy_hardware(conn.device, &conn.hardware);
        self.isers.past += conn.channel.channel().counters();
        let functions = conn.channel.channel().functions();
        self.isers.past_functions.merge(functions);
        if conn.is_closed || !conn.was_established {
            // It is over on both sides, or was never established, so no DREQ is owed; the identifier may
            // be gone already.
            let _ = self.devices[conn.device].destroy_id(conn.cm);
        } else {
            self.lingering
                .push((conn.device, conn.cm, self.now + LINGER));
        }
        if let Some(entered) = &conn.entered {
            let place = Connected {
                transport: Transport::Iser,
                listen: conn.listen,
                peer: conn.peer,
            };
            self.leave_iscsi(conn.channel.channel(), entered, conn.serial, place);
        }
    }

    /// The CM says that a connection is over; `by_peer` if the initiator has ended it.
    pub(in crate::worker) fn on_iser_closed(&mut self, key: usize, by_peer: bool) {
        if let Some(conn) = self.isers.conns.get_mut(key) {
            conn.is_closed = true;
            if by_peer {
                conn.channel.note_closed();
            }
        }
        self.with_iser(key, IserChannel::handle_disconnected);
    }
}
