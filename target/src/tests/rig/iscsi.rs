//! Requests of an iSCSI initiator, for TCP and iSER.

use std::time::Duration;

use riser_scsi::iscsi::pdu::{
    FromInitiator, LoginFlags, LoginRequest, LogoutReason, LogoutRequest, Stage, TextRequest,
    TmfFunction,
};
use riser_scsi::iscsi::{Cid, CmdSn, Isid, Itt, StatSn, Tsih, Ttt};
use riser_test_peers::pdus::{nop_out, tmf_request};

use super::script::Management;
use super::{Peer, Rig};
use crate::fabric::TaskRef;
use crate::fabric::task_mgmt::Function;
use crate::worker::fabrics::Input;

/// Names of the initiator and the target.
pub(crate) const NAMES: &str = "InitiatorName=iqn.2026-01.a:i\0TargetName=iqn.2026-01.a:t0\0";

/// A connection with an iSCSI initiator.
pub(crate) trait IscsiPeer: Peer {
    /// Returns the number of the next command.
    fn cmd_sn(&self) -> u32;

    /// Sends a PDU on a connection.
    fn send_pdu(rig: &mut Rig<Self>, peer: usize, pdu: &FromInitiator, data: &[u8]);
}

/// Functions that abort tasks without closing the session.
pub(super) const FUNCTIONS: &[Function] = &[
    Function::AbortTask,
    Function::AbortTaskSet,
    Function::ClearTaskSet,
    Function::LogicalUnitReset,
    Function::TargetWarmReset,
];

pub(super) fn send_function<P: IscsiPeer>(rig: &mut Rig<P>, peer: usize, management: Management) {
    let request = management.pdu(rig.peers[peer].cmd_sn());
    P::send_pdu(rig, peer, &FromInitiator::TmfRequest(request), &[]);
}

/// Sends a ping without a response.
pub(super) fn keep_alive<P: IscsiPeer>(rig: &mut Rig<P>, peer: usize) {
    let nop = nop_out(Itt::NONE.0, rig.peers[peer].cmd_sn());
    P::send_pdu(rig, peer, &FromInitiator::NopOut(nop), &[]);
}

/// A login that only negotiates operational parameters.
pub(crate) fn login_request(cmd_sn: u32) -> FromInitiator {
    FromInitiator::LoginRequest(LoginRequest {
        flags: LoginFlags {
            current: Stage::Operational,
            transit: Some(Stage::FullFeature),
            continues: false,
        },
        version_max: 0,
        version_min: 0,
        isid: Isid([0; 6]),
        tsih: Tsih(0),
        itt: Itt(0),
        cid: Cid(0),
        cmd_sn: CmdSn(cmd_sn),
        exp_stat_sn: StatSn(0),
    })
}

/// An immediate logout.
pub(crate) fn logout(reason: LogoutReason, cid: u16, tag: u32) -> FromInitiator {
    FromInitiator::LogoutRequest(LogoutRequest {
        immediate: true,
        reason,
        itt: Itt(tag),
        cid: Cid(cid),
        cmd_sn: CmdSn(0),
        exp_stat_sn: StatSn(0),
    })
}

/// An immediate Text Request that continues the exchange of a target transfer tag.
pub(crate) fn text_request(tag: u32, ttt: Ttt, cmd_sn: u32) -> FromInitiator {
    FromInitiator::TextRequest(TextRequest {
        immediate: true,
        is_final: true,
        continues: false,
        lun: [0; 8],
        itt: Itt(tag),
        ttt,
        cmd_sn: CmdSn(cmd_sn),
        exp_stat_sn: StatSn(0),
    })
}

/// The functions return the messages that were received by the initiator.
impl<P: IscsiPeer> Rig<P> {
    pub(crate) fn take_received(&mut self) -> Vec<P::Message> {
        let received = std::mem::take(&mut self.received);
        received.into_iter().map(|(_, message)| message).collect()
    }

    /// Passes an input to the connection.
    pub(crate) fn apply(&mut self, input: Input) -> Vec<P::Message> {
        P::input(self, 0, input);
        self.run_actions()
    }

    pub(crate) fn run_actions(&mut self) -> Vec<P::Message> {
        self.pump();
        self.take_received()
    }

    /// Passes the abort of a task by another nexus to the connection.
    pub(crate) fn abort_by_other(&mut self, task: TaskRef) -> Vec<P::Message> {
        self.abort(task);
        self.take_received()
    }

    pub(crate) fn finish_all_blocks(&mut self) -> Vec<P::Message> {
        while !self.blocks().is_empty() {
            self.finish_block(0);
        }
        self.run_actions()
    }

    pub(crate) fn send(&mut self, pdu: &FromInitiator, data: &[u8]) -> Vec<P::Message> {
        P::send_pdu(self, 0, pdu, data);
        self.take_received()
    }

    pub(crate) fn tmf(
        &mut self,
        tag: u32,
        function: TmfFunction,
        referenced: u32,
    ) -> Vec<P::Message> {
        let request = tmf_request(tag, self.cmd_sn(), function, referenced);
        self.send(&FromInitiator::TmfRequest(request), &[])
    }

    pub(crate) fn nop(&mut self, tag: u32, data: &[u8]) -> Vec<P::Message> {
        let nop = nop_out(tag, self.cmd_sn());
        self.send(&FromInitiator::NopOut(nop), data)
    }

    pub(crate) fn text(&mut self, tag: u32, text: &[u8]) -> Vec<P::Message> {
        self.send(&text_request(tag, Ttt::NONE, self.cmd_sn()), text)
    }

    pub(crate) fn log_out(&mut self) -> Vec<P::Message> {
        self.send(&logout(LogoutReason::CloseSession, 0, 9), &[])
    }

    /// Advances the time.
    pub(crate) fn wait(&mut self, time: Duration) -> Vec<P::Message> {
        self.advance(time);
        self.take_received()
    }
}
