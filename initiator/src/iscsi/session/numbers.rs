//! Sequence numbers of a connection: the command window and the status number.

use riser_scsi::iscsi::pdu::FromTarget;
use riser_scsi::iscsi::{CmdSn, Itt, Numbers, StatSn};

/// Sequence numbers of a connection (RFC 7143 clause 4.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SequenceNumbers {
    cmd_sn: CmdSn,
    max_cmd_sn: CmdSn,
    exp_stat_sn: StatSn,
}

impl SequenceNumbers {
    /// Returns the initial numbers, before a login.
    pub(super) fn new() -> Self {
        Self {
            cmd_sn: CmdSn(1),
            max_cmd_sn: CmdSn(1),
            exp_stat_sn: StatSn(0),
        }
    }

    /// Returns the number of the next command, which immediate PDUs carry, too.
    pub(super) fn cmd_sn(&self) -> CmdSn {
        self.cmd_sn
    }

    /// Returns the next expected status number.
    pub(super) fn exp_stat_sn(&self) -> StatSn {
        self.exp_stat_sn
    }

    /// Returns whether the target accepts another command.
    pub(super) fn is_window_open(&self) -> bool {
        !self.max_cmd_sn.is_before(self.cmd_sn)
    }

    /// Assigns the number of a command.
    pub(super) fn assign_cmd_sn(&mut self) -> CmdSn {
        let cmd_sn = self.cmd_sn;
        self.cmd_sn = cmd_sn.next();
        cmd_sn
    }

    /// Called for a login response, which contains the initial status number.
    pub(super) fn on_login_response(&mut self, numbers: Numbers) {
        self.exp_stat_sn = numbers.stat_sn.next();
    }

    /// Called for the last login response, which opens the command window.
    pub(super) fn on_full_feature(&mut self, numbers: Numbers) {
        self.on_login_response(numbers);
        self.max_cmd_sn = numbers.max_cmd_sn;
    }

    /// Updates the command window and, if the PDU carries one, StatSN.
    pub(super) fn update(&mut self, pdu: &FromTarget, numbers: Numbers) {
        let has_window = !numbers
            .max_cmd_sn
            .is_before(numbers.exp_cmd_sn.plus(u32::MAX));
        if has_window && self.max_cmd_sn.is_before(numbers.max_cmd_sn) {
            self.max_cmd_sn = numbers.max_cmd_sn;
        }
        let has_status = match pdu {
            FromTarget::DataIn(data) => data.status.is_some(),
            // An unsolicited NOP-In and an R2T contain the next number without using it.
            FromTarget::NopIn(nop) => nop.itt != Itt::NONE,
            FromTarget::R2t(_) => false,
            _ => true,
        };
        if has_status && !numbers.stat_sn.is_before(self.exp_stat_sn) {
            self.exp_stat_sn = numbers.stat_sn.next();
        }
    }
}

#[cfg(test)]
mod tests {
    use riser_scsi::iscsi::Ttt;
    use riser_scsi::iscsi::pdu::NopIn;

    use super::*;

    fn numbers(stat_sn: u32, exp_cmd_sn: u32, max_cmd_sn: u32) -> Numbers {
        Numbers {
            stat_sn: StatSn(stat_sn),
            exp_cmd_sn: CmdSn(exp_cmd_sn),
            max_cmd_sn: CmdSn(max_cmd_sn),
        }
    }

    fn nop(itt: Itt) -> FromTarget {
        FromTarget::NopIn(NopIn {
            lun: [0; 8],
            itt,
            ttt: Ttt::NONE,
        })
    }

    #[test]
    fn window_only_grows() {
        let mut own = SequenceNumbers::new();
        own.on_full_feature(numbers(9, 1, 2));
        assert_eq!(own.exp_stat_sn(), StatSn(10));
        assert_eq!(own.assign_cmd_sn(), CmdSn(1));
        assert!(own.is_window_open());
        assert_eq!(own.assign_cmd_sn(), CmdSn(2));
        assert!(!own.is_window_open());
        own.update(&nop(Itt::NONE), numbers(10, 3, 2));
        assert!(!own.is_window_open(), "closed window");
        own.update(&nop(Itt::NONE), numbers(10, 3, 1));
        assert!(!own.is_window_open(), "invalid window");
        own.update(&nop(Itt::NONE), numbers(10, 3, 3));
        assert!(own.is_window_open());
        own.update(&nop(Itt::NONE), numbers(10, 3, 2));
        assert!(own.is_window_open(), "late PDU");
    }

    #[test]
    fn only_responses_use_status_numbers() {
        let mut own = SequenceNumbers::new();
        own.on_full_feature(numbers(9, 1, 2));
        own.update(&nop(Itt::NONE), numbers(10, 1, 2));
        assert_eq!(own.exp_stat_sn(), StatSn(10));
        own.update(&nop(Itt(1)), numbers(10, 1, 2));
        assert_eq!(own.exp_stat_sn(), StatSn(11));
        own.update(&nop(Itt(1)), numbers(10, 1, 2));
        assert_eq!(own.exp_stat_sn(), StatSn(11), "repeated");
    }
}
