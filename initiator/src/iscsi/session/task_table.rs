//! Tasks outstanding at the target, by Initiator Task Tag.

use riser_scsi::iscsi::login::SessionParams;
use riser_scsi::iscsi::pdu::{DataIn, R2t};
use riser_scsi::iscsi::{CmdSn, Itt, Ttt};
use riser_scsi::step::Residual;

use crate::request::DataLen;
use crate::session::{IscsiFault, WritePolicy};

/// Lengths of the payload that a write carries, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct UnsolicitedData {
    /// Immediate data in the command.
    pub(super) immediate: u32,
    /// Data-Out PDUs after the command.
    pub(super) after: u32,
}

/// A command sent to the target.
#[derive(Clone, Copy, Debug)]
pub(super) struct Task {
    pub(super) request: u32,
    pub(super) cmd_sn: CmdSn,
    pub(super) unsolicited: UnsolicitedData,
    len: DataLen,
    /// Number of bytes received.
    received: u32,
    /// Expected number of the next Data-In.
    data_sn: u32,
    /// Number of bytes sent or solicited.
    solicited: u32,
    /// Number of outstanding R2Ts.
    open_r2t: u16,
}

impl Task {
    fn new(request: u32, len: DataLen, cmd_sn: CmdSn, unsolicited: UnsolicitedData) -> Self {
        Self {
            request,
            cmd_sn,
            unsolicited,
            len,
            received: 0,
            data_sn: 0,
            solicited: unsolicited.immediate + unsolicited.after,
            open_r2t: 0,
        }
    }

    /// Checks whether an incoming Data-In with `len` bytes is the next one and fits into the
    /// buffer.
    pub(super) fn check_data_in(&self, data: &DataIn, len: u32) -> Result<(), IscsiFault> {
        let DataLen::In(room) = self.len else {
            return Err(IscsiFault::DataRange);
        };
        if data.data_sn != self.data_sn || data.offset != self.received {
            return Err(IscsiFault::DataOrder);
        }
        match data.offset.checked_add(len) {
            Some(end) if end <= room => Ok(()),
            _ => Err(IscsiFault::DataRange),
        }
    }

    /// Called when a Data-In with `len` bytes was received.
    pub(super) fn on_data_in(&mut self, len: u32) {
        self.data_sn = self.data_sn.wrapping_add(1);
        self.received = self.received.saturating_add(len);
    }

    /// Handles an R2T. It must start at the end of the previous data (DataSequenceInOrder, which a
    /// target cannot decline), so we don't send any byte twice.
    pub(super) fn handle_r2t(
        &mut self,
        r2t: &R2t,
        params: &SessionParams,
    ) -> Result<(), IscsiFault> {
        let DataLen::Out(room) = self.len else {
            return Err(IscsiFault::R2t);
        };
        let end = r2t.offset.checked_add(r2t.len).filter(|end| *end <= room);
        let is_legal = r2t.ttt != Ttt::NONE
            && r2t.len > 0
            && r2t.len <= params.max_burst
            && r2t.offset == self.solicited
            && self.open_r2t < params.max_outstanding_r2t;
        let (Some(end), true) = (end, is_legal) else {
            return Err(IscsiFault::R2t);
        };
        self.solicited = end;
        self.open_r2t += 1;
        Ok(())
    }

    /// Called when the data solicited by an R2T was sent.
    pub(super) fn on_solicited_data_sent(&mut self) {
        self.open_r2t = self.open_r2t.saturating_sub(1);
    }

    /// Returns the number of bytes transferred by the completed command, and of those beyond its
    /// buffer.
    pub(super) fn transferred(
        &self,
        residual: Residual,
        is_rdma: bool,
    ) -> Result<(u32, u32), IscsiFault> {
        let len = match self.len {
            DataLen::None => 0,
            DataLen::In(len) | DataLen::Out(len) => len,
        };
        let (transferred, overflow) = match residual {
            Residual::None => (len, 0),
            Residual::Overflow(more) => (len, more),
            Residual::Underflow(residual) => {
                let moved = len.checked_sub(residual);
                (moved.ok_or(IscsiFault::Residual { residual, len })?, 0)
            }
        };
        // On iSER, only the target knows the actual amount of transferred data. On TCP, it cannot
        // have written data that it neither received unsolicited nor solicited with an R2T.
        let transferred = match self.len {
            DataLen::In(_) if !is_rdma => transferred.min(self.received),
            DataLen::Out(_) if !is_rdma => transferred.min(self.solicited),
            _ => transferred,
        };
        Ok((transferred, overflow))
    }
}

/// A slot for a task. Tags contain its index and generation.
#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    generation: u16,
    task: Option<Task>,
}

/// Tasks of a connection. A slot stays in use until the memory of its task is retired.
#[derive(Debug)]
pub(super) struct TaskTable {
    slots: Vec<Slot>,
    free: Vec<u16>,
    /// Decides whether a write carries data, if the target can fetch it.
    write_policy: WritePolicy,
    /// Number of writes in `slots`.
    writes: usize,
}

impl TaskTable {
    pub(super) fn new(queue_size: u16) -> Self {
        Self {
            slots: vec![Slot::default(); queue_size.into()],
            // We use the last entry first, to ensure that used slots stay close together.
            free: (0..queue_size).rev().collect(),
            write_policy: WritePolicy::new(0),
            writes: 0,
        }
    }

    /// Sets the number of writes whose data the target can fetch concurrently.
    pub(super) fn set_reads(&mut self, reads: u8) {
        self.write_policy = WritePolicy::new(reads);
    }

    /// Removes all tasks, for a new connection.
    pub(super) fn clear(&mut self) {
        self.slots.fill(Slot::default());
        self.free.clear();
        self.free.extend((0..self.slots.len() as u16).rev());
        self.writes = 0;
    }

    /// Returns whether there is no slot for another task.
    pub(super) fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// Adds a task and returns its tag. `unsolicited` is the data that a write carries, unless the
    /// target fetches it.
    ///
    /// # Panics
    /// Panics if all slots are in use.
    pub(super) fn insert(
        &mut self,
        request: u32,
        len: DataLen,
        cmd_sn: CmdSn,
        unsolicited: UnsolicitedData,
    ) -> Itt {
        let index = self.free.pop().expect("there is a free slot");
        let mut carried = UnsolicitedData::default();
        if matches!(len, DataLen::Out(_)) {
            self.writes += 1;
            // Decide this only once, because the number of outstanding writes might change before
            // the command is encoded.
            if self.write_policy.carries_data(self.writes) {
                carried = unsolicited;
            }
        }
        let slot = &mut self.slots[usize::from(index)];
        // We only use half of the numbers, to avoid the reserved value.
        slot.generation = (slot.generation + 1) & 0x7fff;
        slot.task = Some(Task::new(request, len, cmd_sn, carried));
        Itt(u32::from(slot.generation) << 16 | u32::from(index))
    }

    /// Returns an outstanding task.
    pub(super) fn find(&self, itt: Itt) -> Option<&Task> {
        let slot = self.slots.get(slot_of(itt))?;
        let task = slot.task.as_ref()?;
        (u32::from(slot.generation) == itt.0 >> 16).then_some(task)
    }

    /// Mutable variant of [`Self::find`].
    pub(super) fn find_mut(&mut self, itt: Itt) -> Option<&mut Task> {
        let slot = self.slots.get_mut(slot_of(itt))?;
        let task = slot.task.as_mut()?;
        (u32::from(slot.generation) == itt.0 >> 16).then_some(task)
    }

    /// Returns whether a tag may belong to an aborted task.
    pub(super) fn is_stale(&self, itt: Itt) -> bool {
        itt.0 >> 31 == 0 && slot_of(itt) < self.slots.len()
    }

    /// Removes a task whose attempt has ended. Its slot is in use until [`Self::free_slot`].
    pub(super) fn remove(&mut self, itt: Itt) {
        let task = self.slots[slot_of(itt)].task.take();
        if task.is_some_and(|task| matches!(task.len, DataLen::Out(_))) {
            self.writes -= 1;
        }
    }

    /// Frees the slot of a removed task whose memory is retired.
    pub(super) fn free_slot(&mut self, itt: Itt) {
        self.free.push(slot_of(itt) as u16);
    }
}

fn slot_of(itt: Itt) -> usize {
    (itt.0 & 0xffff) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    const BURST: UnsolicitedData = UnsolicitedData {
        immediate: 512,
        after: 512,
    };

    fn insert(table: &mut TaskTable, len: DataLen) -> Itt {
        table.insert(7, len, CmdSn(1), BURST)
    }

    #[test]
    fn tags_differ_between_uses_of_slot() {
        let mut table = TaskTable::new(1);
        let first = insert(&mut table, DataLen::None);
        assert!(table.is_full());
        assert_eq!(table.find(first).unwrap().request, 7);
        table.remove(first);
        assert!(table.find(first).is_none());
        assert!(table.is_full(), "the memory is still in use");
        table.free_slot(first);
        let second = insert(&mut table, DataLen::None);
        assert_ne!(second, first);
        assert!(table.find_mut(first).is_none() && table.is_stale(first));
        assert!(table.find(second).is_some());
        assert!(!table.is_stale(Itt(1)), "beyond the queue");
        assert!(!table.is_stale(Itt::NONE));
        table.clear();
        assert!(!table.is_full() && table.find(second).is_none());
    }

    #[test]
    fn removed_writes_are_not_outstanding() {
        let mut table = TaskTable::new(8);
        table.set_reads(16);
        let carried = |table: &TaskTable, itt| table.find(itt).unwrap().unsolicited == BURST;
        let tags = [(); 4].map(|()| insert(&mut table, DataLen::Out(4096)));
        assert_eq!(
            tags.map(|itt| carried(&table, itt)),
            [true, true, true, false]
        );
        for itt in tags {
            table.remove(itt);
            table.free_slot(itt);
        }
        let read = insert(&mut table, DataLen::In(4096));
        assert!(!carried(&table, read));
        let write = insert(&mut table, DataLen::Out(4096));
        assert!(carried(&table, write));
    }

    #[test]
    fn transferred_length_is_limited_by_data() {
        let mut read = Task::new(0, DataLen::In(1024), CmdSn(1), UnsolicitedData::default());
        read.on_data_in(512);
        assert_eq!(read.transferred(Residual::None, false), Ok((512, 0)));
        assert_eq!(read.transferred(Residual::None, true), Ok((1024, 0)));
        assert_eq!(read.transferred(Residual::Overflow(8), true), Ok((1024, 8)));
        let less = Residual::Underflow(1000);
        assert_eq!(read.transferred(less, false), Ok((24, 0)));
        let fault = IscsiFault::Residual {
            residual: 1025,
            len: 1024,
        };
        assert_eq!(
            read.transferred(Residual::Underflow(1025), true),
            Err(fault)
        );
        let write = Task::new(0, DataLen::Out(4096), CmdSn(1), BURST);
        assert_eq!(write.transferred(Residual::None, false), Ok((1024, 0)));
    }
}
