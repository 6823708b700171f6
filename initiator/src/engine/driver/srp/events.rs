//! Connection events of channels, and completions.

use std::time::Instant;

use riser_scsi::srp::{LOGIN_REQ_LEN, LoginReq};
use riser_transport::verbs::{CmEventKind, Completion};

use super::SrpLink;
use crate::engine::driver::context::Context;
use crate::engine::env::Env;
use crate::engine::rdma::{Completed, ConnEvent};
use crate::engine::srp::{RECV_LEN, ShortIu};
use crate::srp::session::ChannelIndex;

impl SrpLink {
    pub(in crate::engine::driver) fn handle_broken(&mut self, channel: u8, now: Instant) {
        let channel = ChannelIndex(channel);
        self.machine.handle_channel_error(channel, now);
    }

    pub(in crate::engine::driver) fn handle_completion<E: Env>(
        &mut self,
        channel: u8,
        completion: &Completion,
        cx: &mut Context<'_, E>,
    ) {
        let channel = ChannelIndex(channel);
        let Some(conn) = self.conn(channel) else {
            return;
        };
        let now = cx.now;
        match conn.rdma.handle_completion(cx.device(), completion, now) {
            Completed::Nothing => {}
            // The pending logout can no longer be sent.
            Completed::Failed if conn.rdma.closing_until().is_some() => self.close_now(channel, cx),
            Completed::Failed => self.machine.handle_channel_error(channel, cx.now),
            Completed::Message(slot) => self.receive(channel, slot, completion.byte_len, cx.now),
            Completed::Retired(request) => self.machine.handle_retired(request, cx.now),
            Completed::Sent(number) => match conn.sent(number) {
                ShortIu::Reply(slot) => {
                    if !conn.post_recv(cx.device(), slot) {
                        self.machine.handle_channel_error(channel, cx.now);
                    }
                }
                ShortIu::TskMgmt(slot) => conn.on_tsk_mgmt_sent(slot),
                ShortIu::Logout => self.close_now(channel, cx),
            },
        }
    }

    fn receive(&mut self, channel: ChannelIndex, slot: u16, len: u32, now: Instant) {
        let mut iu = [0; RECV_LEN];
        let len = (len as usize).min(RECV_LEN);
        if let Some(conn) = self.conn(channel) {
            conn.received(slot, &mut iu[..len]);
            self.receiving = Some((channel, slot));
            self.machine.handle_iu(channel, &iu[..len], now);
        }
    }

    pub(in crate::engine::driver) fn handle_cm_event<E: Env>(
        &mut self,
        channel: u8,
        event: CmEventKind,
        cx: &mut Context<'_, E>,
    ) {
        let (now, channel) = (cx.now, ChannelIndex(channel));
        let (machine, is_rdma_cm) = (&mut self.machine, self.target.service_id.is_none());
        let login = || private_data(&machine.begin_login(channel), is_rdma_cm);
        let slot = &mut self.slots[usize::from(channel.0)];
        let (device, resources) = (cx.device(), &self.resources);
        match slot.handle_cm_event(device, resources, event, login, now) {
            None => {}
            Some(ConnEvent::Established(param)) => {
                let reads = cx.device().fetches(&param);
                let redirect = slot.redirect();
                machine.handle_connected(channel, &param.private_data, reads, redirect, now);
            }
            Some(ConnEvent::Rejected {
                reason,
                private_data,
            }) => machine.handle_rejected(channel, reason, &private_data, now),
            Some(ConnEvent::Failed(error)) => machine.handle_connect_failed(channel, error, now),
            Some(ConnEvent::Lost) => machine.handle_channel_error(channel, now),
            Some(ConnEvent::Closed) => machine.handle_channel_closed(channel, now),
        }
    }
}

/// Encodes a login as private data of a connect request. The RDMA CM's address header leaves
/// insufficient space for the information unit itself.
fn private_data(login: &LoginReq, is_rdma_cm: bool) -> Vec<u8> {
    let mut private_data = vec![0; LOGIN_REQ_LEN];
    let len = match is_rdma_cm {
        true => login.emit_rdma(&mut private_data),
        false => login.emit(&mut private_data),
    };
    private_data.truncate(len);
    private_data
}
