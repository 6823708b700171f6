//! Completion queues of a device.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use riser_rdma_core_sys::bindings::*;
use riser_rdma_core_sys::{Verbs as Functions, ops};

use super::convert::{checked, last_refusal};
use super::notices::Notices;
use super::objects::{Cq, MANY, pack};
use crate::table::Table;
use crate::verbs::{CqAttr, CqId, CqInitAttr, Moderation, VerbsError};

/// Fields to read from completions with timestamps.
const TIMED: u64 = (IBV_WC_EX_WITH_BYTE_LEN
    | IBV_WC_EX_WITH_IMM
    | IBV_WC_EX_WITH_QP_NUM
    | IBV_WC_EX_WITH_SRC_QP
    | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP
    | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK) as u64;

/// Number of devices opened by this process.
static OPENED: AtomicU32 = AtomicU32::new(0);

/// Completion queues of a device, their notifications and their event channel.
pub(super) struct CqTable {
    pub(super) verbs: Functions,
    context: *mut ibv_context,
    pub(super) channel: *mut ibv_comp_channel,
    pub(super) table: Table<CqId, Cq>,
    pub(super) notices: Notices,
    /// Number of devices opened before this one, which determines the vector of its queues. A
    /// thread has one device, so this distributes threads over the CPUs that handle interrupts.
    spread: u32,
}

impl CqTable {
    /// Creates an empty table. The context and the channel must be open while it is used.
    pub(super) fn new(
        verbs: Functions,
        context: *mut ibv_context,
        channel: *mut ibv_comp_channel,
    ) -> Self {
        Self {
            verbs,
            context,
            channel,
            table: Table::new("completion queues", MANY),
            notices: Notices::new(Instant::now()),
            spread: OPENED.fetch_add(1, Ordering::Relaxed),
        }
    }

    pub(super) fn create(&mut self, init: &CqInitAttr, max_cqe: u32) -> Result<CqId, VerbsError> {
        let entries = init.entries;
        // SAFETY: the context is open.
        let vectors = unsafe { (*self.context).num_comp_vectors };
        let vectors = vectors.max(1).unsigned_abs();
        let vector = init.vector.unwrap_or(self.spread % vectors);
        if vector >= vectors {
            return Err(VerbsError::InvalidParameter("completion vector"));
        }
        if entries == 0 || entries > max_cqe {
            return Err(VerbsError::InvalidParameter("number of entries"));
        }
        // Insert it first, because we need to pass the handle to the library.
        let id = self.table.insert(Cq::new(vector, init.is_timed))?;
        let cq_context = pack(id.0) as usize as *mut _;
        let ptr = if init.is_timed {
            let mut extended = ibv_cq_init_attr_ex {
                cqe: entries,
                cq_context,
                channel: self.channel,
                comp_vector: vector,
                wc_flags: TIMED,
                ..Default::default()
            };
            // SAFETY: the context and the channel are open. The handle is passed as an integer.
            unsafe { ops::ibv_create_cq_ex(self.context, &raw mut extended) }.cast()
        } else {
            let create = self.verbs.ibv_create_cq;
            let entries = i32::try_from(entries).unwrap_or(i32::MAX);
            // SAFETY: same as above.
            unsafe {
                create(
                    self.context,
                    entries,
                    cq_context,
                    self.channel,
                    vector as i32,
                )
            }
        };
        if ptr.is_null() {
            let error = last_refusal("times of completions");
            self.table.remove(id)?;
            return Err(error);
        }
        self.table.get_mut(id)?.ptr = ptr;
        Ok(id)
    }

    pub(super) fn query(&self, cq: CqId) -> Result<CqAttr, VerbsError> {
        let entry = self.table.get(cq)?;
        Ok(CqAttr {
            // SAFETY: the queue is alive.
            entries: unsafe { (*entry.ptr).cqe }.try_into().unwrap_or(0),
            vector: entry.vector,
            is_timed: entry.times.is_some(),
            moderation: entry.moderation,
        })
    }

    pub(super) fn modify(&mut self, cq: CqId, moderation: Moderation) -> Result<(), VerbsError> {
        // The library uses a 16-bit value. It is fine to use a shorter time than requested.
        let period = moderation.period.as_nanos().div_ceil(1000);
        let period = u16::try_from(period).unwrap_or(u16::MAX);
        let mut attr = ibv_modify_cq_attr {
            attr_mask: IBV_CQ_ATTR_MODERATE,
            moderate: ibv_moderate_cq {
                cq_count: moderation.count,
                cq_period: period,
            },
        };
        let entry = self.table.get_mut(cq)?;
        // SAFETY: the queue is alive.
        match unsafe { ops::ibv_modify_cq(entry.ptr, &raw mut attr) }.abs() {
            0 => {}
            // There is nothing to reset.
            libc::EOPNOTSUPP if period == 0 => {}
            libc::EOPNOTSUPP => return Err(VerbsError::InvalidParameter("moderation")),
            other => return Err(VerbsError::Os(other)),
        }
        entry.moderation = Moderation {
            count: moderation.count,
            period: Duration::from_micros(period.into()),
        };
        if period != 0 {
            self.stop_watching(cq);
        }
        Ok(())
    }

    pub(super) fn resize(
        &mut self,
        cq: CqId,
        entries: u32,
        max_cqe: u32,
    ) -> Result<(), VerbsError> {
        // This includes completions which we have already removed from the queue of the library.
        let held = self.peek(cq, entries as usize + 1)?;
        if entries == 0 || entries > max_cqe || held > entries as usize {
            return Err(VerbsError::InvalidParameter("number of entries"));
        }
        // SAFETY: the queue is alive.
        checked(unsafe { (self.verbs.ibv_resize_cq)(self.table.get(cq)?.ptr, entries as i32) })
    }

    pub(super) fn destroy(&mut self, cq: CqId) -> Result<(), VerbsError> {
        let entry = self.table.get(cq)?;
        if entry.users > 0 {
            return Err(VerbsError::ResourceBusy("completion queue"));
        }
        let ptr = entry.ptr;
        self.acknowledge(cq);
        // SAFETY: it is not in use, all events have been acknowledged, and it will be removed from
        // the table.
        checked(unsafe { (self.verbs.ibv_destroy_cq)(ptr) })?;
        self.notices.forget(cq);
        self.table.remove(cq).map(drop)
    }

    pub(super) fn peek(&self, cq: CqId, max: usize) -> Result<usize, VerbsError> {
        let entry = self.table.get(cq)?;
        // The library can't peek, so we need to read the completions and store them for the next
        // poll.
        loop {
            let held = entry.peeked.borrow().len();
            if held >= max || !matches!(entry.pull(max - held), Ok(1..)) {
                let held = entry.peeked.borrow().len();
                return Ok(held.min(max));
            }
        }
    }

    /// Returns a queue for use by the library.
    pub(super) fn ptr(&self, cq: CqId) -> Result<*mut ibv_cq, VerbsError> {
        Ok(self.table.get(cq)?.ptr)
    }

    /// Updates the number of work queues using a queue.
    pub(super) fn change_users(&mut self, cq: CqId, change: i32) {
        if let Ok(cq) = self.table.get_mut(cq) {
            cq.users = cq.users.saturating_add_signed(change);
        }
    }

    /// Destroys all queues.
    ///
    /// # Safety
    /// All objects that use them must have been destroyed, and they can't be used after this.
    pub(super) unsafe fn destroy_all(&mut self) {
        // SAFETY: all pointers in the table are valid, and are only freed here.
        unsafe {
            for (_, cq) in self.table.iter() {
                // The library waits until all events of a queue have been acknowledged.
                (self.verbs.ibv_ack_cq_events)(cq.ptr, cq.unacknowledged);
                (self.verbs.ibv_destroy_cq)(cq.ptr);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::RdmaCoreDevice;
    use crate::verbs::{CqInitAttr, Verbs as _, VerbsError};

    #[test]
    fn devices_are_distributed_over_vectors() {
        let first = RdmaCoreDevice::fake().cqs.spread;
        let mut device = RdmaCoreDevice::fake();
        assert!(device.cqs.spread > first);
        // SAFETY: the context is open and only used by this thread.
        unsafe { (*device.cqs.context).num_comp_vectors = 4 };
        device.cqs.spread = 6;
        for _ in 0..2 {
            let cq = device.create_cq(16).unwrap();
            assert_eq!(device.query_cq(cq).unwrap().vector, 2);
        }
        let with = |vector| CqInitAttr {
            vector: Some(vector),
            ..CqInitAttr::new(16)
        };
        let cq = device.create_cq_with(&with(3)).unwrap();
        assert_eq!(device.query_cq(cq).unwrap().vector, 3);
        assert_eq!(
            device.create_cq_with(&with(4)),
            Err(VerbsError::InvalidParameter("completion vector"))
        );
    }
}
