//! iSER support for a worker: CM connections and their queue pairs.
//!
//! A connection request contains the initiator's offer in its private data, but the login is only
//! sent after the connection is established. We therefore have to accept it before we know the
//! initiator. As with TCP, the number of connections is limited, including connections that are not
//! established and connections before login. If a limit is exceeded, the oldest one is closed, but
//! we never close a connection before login because of one that is not established, since this
//! request could be forged. Login decisions use the gate for iSCSI, so a target has the same units
//! for both transports.
//!
//! # Modules
//! - `connect`: connection requests, queue pairs, and teardown.

mod connect;

use riser_transport::verbs::{Completion, RKey, SendFlags, SendOp, Sge};

use super::PollGroup;
use super::conns::{Conn, ConnKey, Conns};
use super::exec::release_sinks;
use super::fabrics::{Fabric, Input, IserConn};
use super::queue::{ChainSend, Chains, Posted, Receive};
use super::work::Work;
use crate::iscsi::Action;
use crate::iser::{ChainIdx, ConnState, IserAction, Post, RxIdx};
use crate::sessions::unconfirmed::Unconfirmed;

/// Lists which are reused to avoid allocations.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    post: Post,
    receives: Vec<Receive>,
}

impl IserConn {
    /// Returns the work request for a receive descriptor.
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
    /// Returns all iSER connections in the given states before login, starting with the oldest one.
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

impl PollGroup {
    /// Executes the actions of a connection and posts its work requests.
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
                IserAction::Disconnect => {
                    // Nothing can be posted to destroyed queues.
                    self.post_iser_receives(key, &mut receives);
                    self.disconnect(key);
                }
                IserAction::Release => released = true,
                IserAction::Channel(action) => self.carry_out_iser(key, action),
            }
        }
        // Do this before posting chains: a response opens the command window, and the next command
        // will need a receive.
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
            Action::TakeTurn(conn) => self.notify_turn(conn),
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
        let taken = self.devices.post_recvs(device, qp, receives);
        // These will never complete, so we handle them as flushed. Otherwise the connection would
        // wait for them before it can be released.
        for (id, _) in receives.drain(..).skip(taken) {
            if let Work::IserRecv(rx) = Work::of(id) {
                self.with_iser(key, |conn, cx| conn.handle_recv_flushed(cx, rx));
            }
        }
    }

    /// Posts chains while there is room for them.
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
            // The addresses are set by the initiator. If one of them is invalid, the chain is not
            // posted and the connection is closed.
            if let Err(error) = chains.push(work, post.requests.drain(..), pool, send) {
                tracing::debug!(%error, "a descriptor names no memory");
                self.post_iser(key, &mut chains, Some(work));
                continue;
            }
            if let Some(sinks) = &mut conn.rdma.hardware.sinks {
                let dev = &mut self.devices[conn.rdma.device];
                if let Err(error) = chains.register_sinks(dev, self.pool.memory(), sinks) {
                    tracing::warn!(%error, "cannot register memory for a READ");
                    self.post_iser(key, &mut chains, Some(work));
                    continue;
                }
            }
            if chains.is_full() {
                self.post_iser(key, &mut chains, None);
            }
        }
        self.post_iser(key, &mut chains, None);
        self.chains = chains;
        self.iser.post = post;
    }

    /// Posts chains, and fails a chain that is invalid.
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

    /// Handles chains that were not fully posted.
    fn end_iser_chains(&mut self, key: ConnKey, left: &[(Work, Posted)]) {
        let Some(conn) = self.conns.iser(key) else {
            return;
        };
        let unposted = left.iter().filter(|(_, posted)| *posted == Posted::Nothing);
        // While there are work requests in progress, the same buffer could still be used by an
        // earlier part of this transfer.
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

    /// Handles a completion of a connection.
    pub(super) fn on_iser_completion(&mut self, key: ConnKey, completion: &Completion) {
        let ok = completion.status.is_ok();
        let work = Work::of(completion.wr_id);
        match work {
            Work::IserRecv(rx) if ok => self.on_iser_message(key, rx, completion.byte_len as usize),
            Work::IserRecv(rx) => self.with_iser(key, |conn, cx| conn.handle_recv_flushed(cx, rx)),
            Work::IserPost(chain) => self.on_iser_posted(key, chain, ok),
            // The message was not sent, regardless of the status of the marker.
            Work::IserTorn(chain) => self.on_iser_posted(key, chain, false),
            Work::Drain => self.input(key, Input::Drained),
            // A request in the middle of a chain, so its last request will also fail.
            _ => self.input(key, Input::Disconnected),
        }
    }

    fn on_iser_posted(&mut self, key: ConnKey, chain: ChainIdx, ok: bool) {
        release_sinks(self, key, Work::IserPost(chain));
        self.with_iser(key, |conn, cx| conn.handle_post_done(cx, chain, ok));
    }

    fn on_iser_message(&mut self, key: ConnKey, rx: RxIdx, len: usize) {
        let Some(conn) = self.conns.iser(key) else {
            return;
        };
        let slot = conn.channel.receive_slot(rx);
        self.with_received(slot, len, |group, bytes| {
            group.with_iser(key, |conn, cx| conn.handle_recv(cx, rx, bytes));
        });
    }
}
