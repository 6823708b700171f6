//! What a connection keeps, to send it once more when the initiator asks: error recovery level 1
//! (RFC 7143 7.8, 7.9, 11.16).
//!
//! A status PDU is kept from when it is sent until ExpStatSN acknowledges it; so is the task whose
//! end it is, with its data. A SNACK names statuses by their numbers, and Data-In PDUs by the
//! numbers that they had; these follow from how the data are cut, so nothing else is kept of them.
//! Where MaxRecvDataSegmentLength has changed since, an R-Data SNACK asks for all the data, cut
//! again.
//!
//! # Bounds
//! What ends tasks is bounded by their contexts. Other PDUs count as if they waited to be sent, so
//! a peer that never acknowledges is not read from any more, and is dropped when a ping stays
//! unanswered.

use std::collections::VecDeque;

use riser_scsi::iscsi::pdu::{RejectReason, Snack, SnackKind};
use riser_scsi::iscsi::{Itt, NO_TAG, StatSn};

use super::datamover::{Control, PutData};
use crate::fabric::TaskIdx;

/// A status PDU that was sent.
#[derive(Clone, Debug)]
enum Status {
    Control(Control),
    /// With the last of these data.
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

/// PDUs to send once more.
#[derive(Clone, Debug)]
pub(super) enum Retransmission {
    /// This PDU with its old number.
    Control(Control, StatSn),
    /// Data-In PDUs with these numbers; the last one of all with its status, if that was sent.
    Data {
        put: PutData,
        from: u32,
        until: u32,
        stat_sn: Option<StatSn>,
    },
}

/// PDUs that are kept of a connection.
#[derive(Debug, Default)]
pub(super) struct Recovery {
    is_on: bool,
    kept: VecDeque<SentStatus>,
    /// Kept PDUs that end no task.
    others: usize,
    /// Data of tasks whose answer is not acknowledged.
    data: Vec<PutData>,
}

impl Recovery {
    /// From here on statuses are kept.
    pub(super) fn turn_on(&mut self) {
        self.is_on = true;
    }

    /// Whether statuses are kept.
    pub(super) fn is_on(&self) -> bool {
        self.is_on
    }

    /// Kept PDUs that end no task.
    pub(super) fn others(&self) -> usize {
        self.others
    }

    /// Bytes of the data segments of these.
    pub(super) fn bytes_of_others(&self) -> usize {
        let others = self.kept.iter().filter_map(|kept| match &kept.status {
            Status::Control(control) if control.ends.is_none() => Some(control.data.len()),
            _ => None,
        });
        others.sum()
    }

    /// Data begin to be sent.
    pub(super) fn on_data(&mut self, put: PutData) {
        if self.is_on {
            // Of the piece before it everything is acknowledged.
            self.forget(put.task);
            self.data.push(put);
        }
    }

    /// A status PDU is sent; whether it is kept, and its task with it.
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

    /// As [`Recovery::keep_control`], of a status that went with data.
    pub(super) fn keep_data(&mut self, put: PutData, stat_sn: StatSn) -> bool {
        if self.is_on {
            self.kept.push_back(SentStatus {
                stat_sn,
                status: Status::Data(put),
            });
        }
        self.is_on
    }

    /// The initiator has every status before this one, or `None`: it leaves, and nothing is kept
    /// any more. The tasks that end with that.
    pub(super) fn acknowledge(&mut self, exp: Option<StatSn>) -> Vec<TaskIdx> {
        // An initiator that leaves asks for nothing once more, so what follows is not kept either.
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

    /// Forgets a task that has ended.
    pub(super) fn forget(&mut self, task: TaskIdx) {
        self.data.retain(|put| put.task != task);
    }

    /// Returns what a SNACK asks for.
    ///
    /// # Errors
    /// The reason to reject it: what is not there was acknowledged or never sent, which is a
    /// protocol error of the initiator (RFC 7143 11.16); without recovery, or where it cannot be
    /// cut again, [`RejectReason::SnackReject`].
    pub(super) fn find(&self, snack: &Snack) -> Result<Vec<Retransmission>, RejectReason> {
        match snack.kind {
            _ if !self.is_on => Err(RejectReason::SnackReject),
            SnackKind::Status => self.find_status(StatSn(snack.begin), snack.run),
            SnackKind::DataOrR2t => self.find_data(snack.itt, snack.begin, snack.run),
            SnackKind::DataAck | SnackKind::RData => {
                unreachable!("asked for by functions of their own")
            }
        }
    }

    /// The data that an R-Data SNACK asks for: all that are not acknowledged (RFC 7143 11.16.3).
    /// Their status does not go with them any more. Of data that go in pieces they are not all
    /// here.
    pub(super) fn find_all_data(&mut self, snack: &Snack) -> Result<PutData, RejectReason> {
        // All data are meant, so a range is an error. The tag comes back in the answer, which zero
        // could not do: that is the tag of an answer to no SNACK.
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

    /// The response of a task is another one from now on, with the number that it had, if it was
    /// sent.
    pub(super) fn replace(&mut self, task: TaskIdx, control: &Control) -> Option<StatSn> {
        let kept = self
            .kept
            .iter_mut()
            .find(|kept| kept.ends() == Some(task))?;
        kept.status = Status::Control(control.clone());
        Some(kept.stat_sn)
    }

    /// The response of a task that was sent without data.
    pub(super) fn response_of(&self, task: TaskIdx) -> Option<Control> {
        self.kept.iter().find_map(|kept| match &kept.status {
            Status::Control(control) if control.ends == Some(task) => Some(control.clone()),
            _ => None,
        })
    }

    fn find_status(&self, begin: StatSn, run: u32) -> Result<Vec<Retransmission>, RejectReason> {
        if begin.0 == 0 && run == 0 {
            // All that are not acknowledged.
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
            // Cut to the last one where their number is known.
            from: u32::MAX,
            until: u32::MAX,
            stat_sn: Some(kept.stat_sn),
        },
    }
}
