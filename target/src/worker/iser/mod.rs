//! iSER on a worker: connections that the CM brings, and what connects them to queue pairs.
//!
//! A request for a connection carries the initiator's offer in its private data; the login itself
//! comes over the connection. So a connection exists before it is known whose it is. Connections
//! are bounded like those of TCP, and so are those that are not established, and those that have
//! not logged in: the oldest give way, and one of the latter never for one of the former, whose
//! request may be forged. The gate of iSCSI decides about logins: one target serves the same units
//! over both.
//!
//! # Modules
//! - `connect`: requests, queue pairs, the end.

mod connect;

use riser_transport::verbs::{Completion, RKey, SendFlags, SendOp, Sge};

use super::Worker;
use super::conns::{Conn, ConnKey, Conns};
use super::fabrics::{Fabric, Input, IserConn};
use super::queue::{ChainSend, Chains, Posted, Receive};
use super::work::Work;
use crate::iscsi::Action;
use crate::iser::{ChainIdx, ConnState, IserAction, Post, RxIdx};
use crate::sessions::unconfirmed::Unconfirmed;

/// Lists that are kept between calls, so that none allocates.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    post: Post,
    receives: Vec<Receive>,
}

impl IserConn {
    /// The receive of a descriptor of the ring.
    pub(super) fn receive(&self, rx: RxIdx) -> Receive {
        let slot = self.channel.receive_slot(rx);
        let place = Sge {
            addr: slot.addr(),
            length: slot.len() as u32,
            lkey: self.rdma.hardware.receive_key,
        };
        (Work::IserRecv(rx).id(), place)
    }
}

impl Conns<Fabric> {
    /// The connections of iSER in some of the states before a login, the oldest first.
    fn isers_in(&self, states: &[ConnState]) -> Vec<Unconfirmed<ConnKey>> {
        let meant = self
            .isers()
            .filter(|(_, _, iser)| states.contains(&iser.channel.state()));
        let mut all: Vec<_> = meant.collect();
        all.sort_unstable_by_key(|(_, conn, _)| conn.serial());
        let of = |(what, conn, _): (ConnKey, &Conn<Fabric>, _)| Unconfirmed {
            address: conn.peer.ip().to_canonical(),
            what,
        };
        all.into_iter().map(of).collect()
    }
}

impl Worker {
    /// Carries out what a connection asks for, and posts what it has to post.
    pub(super) fn pump_iser(&mut self, key: ConnKey) {
        let mut released = false;
        let mut receives = std::mem::take(&mut self.iser.receives);
        while let Some(conn) = self.conns.iser_mut(key) {
            let Some(action) = conn.channel.poll_action() else {
                break;
            };
            match action {
                IserAction::PostRecv(rx) => {
                    receives.push(conn.receive(rx));
                }
                IserAction::NotifyEstablished => self.notify_established(key),
                IserAction::Disconnect => self.disconnect(key),
                IserAction::Release => released = true,
                IserAction::Channel(action) => self.carry_out_iser(key, action),
            }
        }
        // Before the chains: an answer opens the initiator's window, and its next command needs a
        // receive.
        self.post_iser_receives(key, &mut receives);
        self.iser.receives = receives;
        if released {
            return self.release(key);
        }
        self.post_iser_chains(key);
    }

    fn carry_out_iser(&mut self, key: ConnKey, action: Action) {
        match action {
            Action::Task(action) => self.carry_out_task(key, action),
            Action::TakeTurn(conn) => self.give_turn(conn),
            Action::EndOthers => self.end_others(key),
            Action::Disconnect | Action::Release => {
                unreachable!("the connection keeps these for itself")
            }
            Action::Lost | Action::Detached | Action::Reassign(_) | Action::DeliverTask => {
                unreachable!("iSER does not recover: `Datamover::RECOVERS`")
            }
        }
    }

    fn post_iser_receives(&mut self, key: ConnKey, receives: &mut Vec<Receive>) {
        let Some(conn) = self.conns.iser(key).filter(|_| !receives.is_empty()) else {
            return;
        };
        let (device, qp) = (conn.rdma.device, conn.rdma.hardware.qp);
        let taken = self.post_recvs(device, qp, receives);
        // One that was not taken never completes. It counts as flushed, or the end of the
        // connection would wait for it.
        for (id, _) in receives.drain(..).skip(taken) {
            if let Work::IserRecv(rx) = Work::of(id) {
                self.with_iser(key, |conn, cx| conn.handle_recv_flushed(cx, rx));
            }
        }
    }

    /// Posts chains as far as there is room for them.
    fn post_iser_chains(&mut self, key: ConnKey) {
        let mut post = std::mem::take(&mut self.iser.post);
        let mut chains = std::mem::take(&mut self.chains);
        while let Some(conn) = self.conns.iser_mut(key) {
            if !conn.channel.poll_post(self.now, &mut post) {
                break;
            }
            let pool = (self.pool.memory(), conn.rdma.hardware.pool_key);
            let send = post.send.take().map(|send| ChainSend {
                bytes: Sge {
                    addr: send.bytes.addr(),
                    length: send.bytes.len() as u32,
                    lkey: conn.rdma.hardware.send_key,
                },
                op: match send.invalidate {
                    Some(stag) => SendOp::SendInv(RKey(stag.0)),
                    None => SendOp::Send,
                },
                flags: SendFlags::SOLICITED,
            });
            let work = Work::IserPost(post.chain);
            // The initiator chooses the addresses. Of a chain with one that cannot be, nothing is
            // posted, and the connection ends.
            if let Err(error) = chains.push(work, post.requests.drain(..), pool, send) {
                tracing::debug!(%error, "a descriptor names no memory");
                self.post_iser(key, &mut chains, Some(work));
            } else if chains.is_full() {
                self.post_iser(key, &mut chains, None);
            }
        }
        self.post_iser(key, &mut chains, None);
        self.chains = chains;
        self.iser.post = post;
    }

    /// Posts chains, and ends another one that cannot be posted.
    fn post_iser(&mut self, key: ConnKey, chains: &mut Chains, bad: Option<Work>) {
        let Some(conn) = self.conns.iser(key) else {
            return chains.clear();
        };
        let (device, qp) = (conn.rdma.device, conn.rdma.hardware.qp);
        let posted = chains.post(&mut self.devices[device], qp);
        let has_failed = posted.is_err();
        let mut left = posted.err().unwrap_or_default();
        left.extend(bad.map(|work| (work, Posted::Nothing)));
        self.end_iser_chains(key, &left);
        if has_failed && left.is_empty() {
            self.input(key, Input::Disconnected);
        }
    }

    /// Ends chains that the device did not take in full.
    fn end_iser_chains(&mut self, key: ConnKey, left: &[(Work, Posted)]) {
        let Some(conn) = self.conns.iser(key) else {
            return;
        };
        let unposted = left.iter().filter(|(_, posted)| *posted == Posted::Nothing);
        // While the device has anything, an earlier portion of the same transfer may be under way
        // in the same buffer.
        let has_others = conn.channel.outstanding() > unposted.count();
        for (work, posted) in left {
            let Work::IserPost(chain) = *work else {
                unreachable!("a chain of iSER")
            };
            if has_others || *posted == Posted::Part {
                self.end_torn_chain(key, Work::IserTorn(chain));
            } else {
                self.on_iser_posted(key, chain, false);
            }
        }
    }

    /// A completion of a connection's queue.
    pub(super) fn on_iser_completion(&mut self, key: ConnKey, completion: &Completion) {
        let ok = completion.status.is_ok();
        let work = Work::of(completion.wr_id);
        match work {
            Work::IserRecv(rx) if ok => self.on_iser_message(key, rx, completion.byte_len as usize),
            Work::IserRecv(rx) => self.with_iser(key, |conn, cx| conn.handle_recv_flushed(cx, rx)),
            Work::IserPost(chain) => self.on_iser_posted(key, chain, ok),
            // The message of the chain was not sent, however the marker fared.
            Work::IserTorn(chain) => self.on_iser_posted(key, chain, false),
            Work::Drain => self.input(key, Input::Drained),
            // One before the last of its chain, which fails as well.
            _ => self.input(key, Input::Disconnected),
        }
    }

    fn on_iser_posted(&mut self, key: ConnKey, chain: ChainIdx, ok: bool) {
        self.with_iser(key, |conn, cx| conn.handle_post_done(cx, chain, ok));
    }

    fn on_iser_message(&mut self, key: ConnKey, rx: RxIdx, len: usize) {
        let Some(conn) = self.conns.iser(key) else {
            return;
        };
        let slot = conn.channel.receive_slot(rx);
        self.with_received(slot, len, |worker, bytes| {
            worker.with_iser(key, |conn, cx| conn.handle_recv(cx, rx, bytes));
        });
    }
}
