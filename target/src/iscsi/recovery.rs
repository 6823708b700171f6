//! PDUs kept for retransmission at error recovery level 1 (RFC 7143 7.8, 7.9, 11.16).
//!
//! A status PDU is kept after it's sent, until it's acknowledged with ExpStatSN. If this PDU
//! completes a task, the task is kept with its data. A SNACK specifies StatSN values or DataSN
//! values. Since we can calculate how the data was split into PDUs, no other state is required for
//! Data-In. If MaxRecvDataSegmentLength has changed since the data was sent, the initiator uses an
//! R-Data SNACK to request all data with the new PDU size.
//!
//! # Limits
//! PDUs that complete a task are limited by the number of contexts. All other PDUs count towards
//! the send queue limit. If a peer never sends an acknowledgment, we therefore stop reading and
//! close the connection after a ping timeout.

use std::collections::VecDeque;

use riser_scsi::iscsi::pdu::{RejectReason, Snack, SnackKind};
use riser_scsi::iscsi::{Itt, NO_TAG, StatSn};

use super::datamover::{Control, PutData};
use crate::fabric::TaskIdx;

/// Status PDU that was sent.
#[derive(Clone, Debug)]
enum Status {
    Control(Control),
    /// Sent with the last PDU of this data.
    Data(PutData),
}

#[derive(Clone, Debug)]
struct SentStatus {
    stat_sn: StatSn,
    status: Status,
}

impl SentStatus {
    fn ends(&self) -> Option<TaskIdx> {
        match &self.status {
            Status::Control(control) => control.ends,
            Status::Data(put) => Some(put.task),
        }
    }
}

/// PDUs to retransmit.
#[derive(Clone, Debug)]
pub(super) enum Retransmission {
    /// A control-type PDU with its previous StatSN.
    Control(Control, StatSn),
    /// Data-In PDUs with these numbers. The status is included in the last one if it was sent.
    Data {
        put: PutData,
        from: u32,
        until: u32,
        stat_sn: Option<StatSn>,
    },
}

/// PDUs kept for a connection.
#[derive(Debug, Default)]
pub(super) struct Recovery {
    is_on: bool,
    kept: VecDeque<SentStatus>,
    /// Number of kept PDUs that don't complete a task.
    others: usize,
    /// Data of tasks with an unacknowledged response.
    data: Vec<PutData>,
}

impl Recovery {
    /// Enables recovery. Subsequent status PDUs are kept.
    pub(super) fn turn_on(&mut self) {
        self.is_on = true;
    }

    /// Returns true if recovery is enabled.
    pub(super) fn is_on(&self) -> bool {
        self.is_on
    }

    /// Returns the number of kept PDUs that don't complete a task.
    pub(super) fn others(&self) -> usize {
        self.others
    }

    /// Returns the total data segment size of kept PDUs that don't complete a task, in bytes.
    pub(super) fn bytes_of_others(&self) -> usize {
        let others = self.kept.iter().filter_map(|kept| match &kept.status {
            Status::Control(control) if control.ends.is_none() => Some(control.data.len()),
            _ => None,
        });
        others.sum()
    }

    /// Called at the start of a data transfer.
    pub(super) fn on_data(&mut self, put: PutData) {
        if self.is_on {
            // The previous piece has been fully acknowledged.
            self.discard_data(put.task);
            self.data.push(put);
        }
    }

    /// Called when a status PDU is sent. Returns true if it must be kept together with its task.
    pub(super) fn keep_control(&mut self, control: &Control, stat_sn: StatSn) -> bool {
        if self.is_on {
            self.others += usize::from(control.ends.is_none());
            self.kept.push_back(SentStatus {
                stat_sn,
                status: Status::Control(control.clone()),
            });
        }
        self.is_on
    }

    /// Same as [`Recovery::keep_control`] if the status was sent with the data.
    pub(super) fn keep_data(&mut self, put: PutData, stat_sn: StatSn) -> bool {
        if self.is_on {
            self.kept.push_back(SentStatus {
                stat_sn,
                status: Status::Data(put),
            });
        }
        self.is_on
    }

    /// Handles an acknowledgment for all status numbers before `exp`. If this is `None`, the
    /// initiator is logging out and we discard everything. Returns the tasks that are now complete.
    pub(super) fn acknowledge(&mut self, exp: Option<StatSn>) -> Vec<TaskIdx> {
        // After a logout request, the initiator can't request retransmission, so we don't keep any
        // new PDUs.
        self.is_on &= exp.is_some();
        let mut ended = Vec::new();
        while let Some(kept) = self.kept.front()
            && exp.is_none_or(|exp| kept.stat_sn.is_before(exp))
        {
            match kept.ends() {
                Some(task) => ended.push(task),
                None => self.others -= 1,
            }
            self.kept.pop_front();
        }
        self.data.retain(|put| !ended.contains(&put.task));
        ended
    }

    /// Removes a task that has completed.
    pub(super) fn discard_data(&mut self, task: TaskIdx) {
        self.data.retain(|put| put.task != task);
    }

    /// Returns the PDUs requested by a SNACK.
    ///
    /// # Errors
    /// Returns the reject reason. A request for PDUs that were acknowledged or never sent is a
    /// protocol error (RFC 7143 11.16). If recovery isn't enabled, or the data can't be split
    /// again, this returns [`RejectReason::SnackReject`].
    pub(super) fn find(&self, snack: &Snack) -> Result<Vec<Retransmission>, RejectReason> {
        match snack.kind {
            _ if !self.is_on => Err(RejectReason::SnackReject),
            SnackKind::Status => self.find_status(StatSn(snack.begin), snack.run),
            SnackKind::DataOrR2t => self.find_data(snack.itt, snack.begin, snack.run),
            SnackKind::DataAck | SnackKind::RData => {
                unreachable!("requested by separate functions")
            }
        }
    }

    /// Returns the data for an R-Data SNACK, which requests all unacknowledged data (RFC 7143
    /// 11.16.3). The status is removed because it's sent separately. If a command is split into
    /// pieces, only some of its data is available.
    pub(super) fn find_all_data(&mut self, snack: &Snack) -> Result<PutData, RejectReason> {
        // An R-Data SNACK always requests all data, so it must not have a range. The tag will be
        // sent in the response and must not be zero, which means that there is no SNACK.
        let is_legal = snack.begin == 0 && snack.run == 0 && ![0, NO_TAG].contains(&snack.ttt.0);
        let is_whole = |put: &PutData| put.base == 0 && !put.more;
        let mut data = self.data.iter_mut();
        let put = data.find(|put| put.itt == snack.itt && is_legal);
        let put = put.ok_or(RejectReason::ProtocolError)?;
        if !is_whole(put) {
            return Err(RejectReason::SnackReject);
        }
        Ok(std::mem::replace(
            put,
            PutData {
                status: None,
                ..*put
            },
        ))
    }

    /// Replaces the response of a task. If the previous response was sent, this returns its StatSN.
    pub(super) fn replace(&mut self, task: TaskIdx, control: &Control) -> Option<StatSn> {
        let kept = self
            .kept
            .iter_mut()
            .find(|kept| kept.ends() == Some(task))?;
        kept.status = Status::Control(control.clone());
        Some(kept.stat_sn)
    }

    /// Returns the response of a task if it was sent without data.
    pub(super) fn response_of(&self, task: TaskIdx) -> Option<Control> {
        self.kept.iter().find_map(|kept| match &kept.status {
            Status::Control(control) if control.ends == Some(task) => Some(control.clone()),
            _ => None,
        })
    }

    fn find_status(&self, begin: StatSn, run: u32) -> Result<Vec<Retransmission>, RejectReason> {
        if begin.0 == 0 && run == 0 {
            // Return everything that isn't acknowledged.
            return Ok(self.kept.iter().map(again_of).collect());
        }
        let first = self.kept.front().map(|kept| kept.stat_sn);
        if first.is_none_or(|first| begin.is_before(first)) {
            return Err(RejectReason::ProtocolError);
        }
        let wanted = self.kept.iter().filter(|kept| {
            let steps = kept.stat_sn.since(begin);
            !kept.stat_sn.is_before(begin) && (run == 0 || steps < run)
        });
        let again: Vec<_> = wanted.map(again_of).collect();
        if again.is_empty() {
            return Err(RejectReason::ProtocolError);
        }
        Ok(again)
    }

    fn find_data(
        &self,
        itt: Itt,
        from: u32,
        run: u32,
    ) -> Result<Vec<Retransmission>, RejectReason> {
        let mut data = self.data.iter();
        let put = data.find(|put| put.itt == itt);
        let put = *put.ok_or(RejectReason::ProtocolError)?;
        let is_all = from == 0 && run == 0;
        if from < put.start.data_sn && !is_all {
            return Err(RejectReason::ProtocolError);
        }
        let with_it = |kept: &&SentStatus| {
            matches!(kept.status, Status::Data(_)) && kept.ends() == Some(put.task)
        };
        Ok(vec![Retransmission::Data {
            put,
            from,
            until: if run == 0 {
                u32::MAX
            } else {
                from.saturating_add(run)
            },
            stat_sn: self.kept.iter().find(with_it).map(|kept| kept.stat_sn),
        }])
    }
}

fn again_of(kept: &SentStatus) -> Retransmission {
    match &kept.status {
        Status::Control(control) => Retransmission::Control(control.clone(), kept.stat_sn),
        Status::Data(put) => Retransmission::Data {
            put: *put,
            // Limited to the last PDU when the number of PDUs is known.
            from: u32::MAX,
            until: u32::MAX,
            stat_sn: Some(kept.stat_sn),
        },
    }
}
