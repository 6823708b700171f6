//! Completion queue notification without system calls while there is work to do.
//!
//! We need a system call (or at least a write to the device) to arm a queue in the device, to check
//! for its event, and to read the event. This is not required while the application is awake: if
//! notification is requested for a queue, it becomes *watched*, i.e. it is polled by
//! [`progress`](crate::verbs::Provider::progress), which only reads user memory. Before the
//! application sleeps ([`arm_fds`](crate::verbs::Provider::arm_fds)), we arm the device, and then
//! poll the queue again, since there is no event for completions that arrived before it was armed.
//!
//! ```text
//! Idle → Watched → Armed
//!  ↑ ↑______│        │
//!  └─────────────────┘
//! ```
//!
//! If the events of a queue should be delayed to wait for more completions, it is armed
//! immediately, because this is only supported by the device.
//!
//! # Bounds
//! Up to [`WATCHED`] queues are watched. If there are more, the queue that has been empty for the
//! longest time is armed instead, so that a large number of idle connections doesn't slow down the
//! rounds of a busy connection. The device descriptors are checked in every round if there is no
//! work, and less often under load ([`Notices`]).

use std::collections::VecDeque;

use riser_rdma_core_sys::bindings::{
    IBV_WC_SUCCESS, IBV_WC_WITH_IMM, IBV_WC_WITH_INV, ibv_cq_ex, ibv_wc,
};
use riser_rdma_core_sys::ops;

use super::convert::checked;
use super::cqs::CqTable;
use super::notices::Arming;
#[cfg(doc)]
use super::notices::Notices;
use super::objects::{BATCH, Cq, Times, unpack};
use crate::verbs::{CqId, Notify, VerbsError};

/// Max number of queues polled in each round. Polling an empty queue reads a single word of memory.
const WATCHED: usize = 64;

/// Number of events of a queue to acknowledge at once. To do this, the library needs to lock a
/// mutex and wake up waiting threads.
const ACK_BATCH: u32 = 64;

impl Cq {
    /// Removes up to a batch of completions from the library and stores them for later polls.
    /// Returns the number of completions.
    ///
    /// # Errors
    /// [`VerbsError::CqOverrun`] if the library returns an error: the queue can't be used anymore.
    pub(super) fn pull(&self, most: usize) -> Result<usize, VerbsError> {
        let mut batch = self.batch.borrow_mut();
        let most = most.min(batch.len());
        let n = match &self.times {
            // SAFETY: the queue is alive, and the batch has space for this number of entries.
            None => unsafe { ops::ibv_poll_cq(self.ptr, most as i32, batch.as_mut_ptr()) },
            Some(times) => self.pull_timed(&mut batch[..most], &mut times.borrow_mut()),
        };
        let n = usize::try_from(n).map_err(|_| VerbsError::CqOverrun)?;
        if n > most {
            // This should never happen, but in this case we don't know where it has written to.
            return Err(VerbsError::CqOverrun);
        }
        if n > 0 {
            let found = batch[..n].iter_mut().map(std::mem::take);
            self.peeked.borrow_mut().extend(found);
            self.has_new.set(true);
        }
        Ok(n)
    }

    /// Removes completions with their timestamps. Returns their number, or a negative error code.
    fn pull_timed(&self, batch: &mut [ibv_wc], times: &mut VecDeque<Times>) -> i32 {
        let cq = self.ptr.cast::<ibv_cq_ex>();
        let mut count = 0;
        for place in batch {
            // SAFETY: a queue with timestamps is an extended queue, and it is valid. A batch has
            // been started once there is a completion.
            let found = unsafe {
                match count {
                    0 => ops::ibv_start_poll(cq),
                    _ => ops::ibv_next_poll(cq),
                }
            };
            match found {
                0 => {}
                // Return the completions before the error. The next call will fail again.
                _ if count > 0 => break,
                libc::ENOENT => return 0,
                _ => return -1,
            }
            // SAFETY: the current position of the batch is a completion.
            unsafe {
                *place = current(cq);
                times.push_back(Times {
                    ticks: ops::ibv_wc_read_completion_ts(cq),
                    wall: ops::ibv_wc_read_completion_wallclock_ns(cq),
                });
            }
            count += 1;
        }
        if count > 0 {
            // SAFETY: a batch has been started, and is finished here.
            unsafe { ops::ibv_end_poll(cq) };
        }
        count
    }

    /// Returns whether the application should poll this queue: either a completion has been added
    /// since notification was requested, or there is an error to report.
    fn has_news(&self) -> bool {
        let held = self.peeked.borrow().len();
        // Keep completions the application has not polled yet, and only add up to a batch.
        let pulled = match held < BATCH {
            true => self.pull(BATCH - held),
            false => Ok(0),
        };
        match pulled {
            Ok(_) => self.has_new.get() && !self.peeked.borrow().is_empty(),
            Err(_) => true,
        }
    }
}

/// Returns the current completion of a batch. If the request has failed, only the number, status
/// and QP are valid (ibv_poll_cq(3)).
///
/// # Safety
/// The queue must be valid, and the current position of its batch must be a completion.
unsafe fn current(cq: *mut ibv_cq_ex) -> ibv_wc {
    // SAFETY: ensured by the caller.
    unsafe {
        let mut wc = ibv_wc {
            wr_id: (*cq).wr_id,
            status: (*cq).status,
            qp_num: ops::ibv_wc_read_qp_num(cq),
            ..ibv_wc::default()
        };
        if wc.status != IBV_WC_SUCCESS {
            wc.vendor_err = ops::ibv_wc_read_vendor_err(cq);
            return wc;
        }
        wc.opcode = ops::ibv_wc_read_opcode(cq);
        wc.wc_flags = ops::ibv_wc_read_wc_flags(cq);
        wc.byte_len = ops::ibv_wc_read_byte_len(cq);
        wc.src_qp = ops::ibv_wc_read_src_qp(cq);
        if wc.wc_flags & (IBV_WC_WITH_IMM | IBV_WC_WITH_INV) != 0 {
            wc.__bindgen_anon_1.imm_data = ops::ibv_wc_read_imm_data(cq);
        }
        wc
    }
}

impl CqTable {
    /// Requests an event for the next completion. This will return whether completions are already
    /// available. The library has no counts, so an event is sent at the first completion.
    pub(super) fn request_notice(&mut self, cq: CqId, notify: Notify) -> Result<bool, VerbsError> {
        let entry = self.table.get(cq)?;
        if entry.overrun {
            // There won't be an event, so the user must poll the queue to get the error.
            return Ok(true);
        }
        let arming = entry.arming;
        if let Notify::Count(count) = notify
            && (count == 0 || count > self.query(cq)?.entries)
        {
            return Err(VerbsError::InvalidParameter("completion count"));
        }
        match notify {
            // We are already waiting for any completion, which must not be changed by this call
            // (IBTA 11.4.2.2).
            Notify::Solicited if matches!(arming, Arming::Watched | Arming::Armed) => {}
            // Only the device knows which messages are solicited.
            Notify::Solicited => self.arm_solicited(cq)?,
            Notify::Next | Notify::Count(_) => self.watch(cq)?,
        }
        let is_waiting = self.peek(cq, 1)? > 0;
        // The return value covers existing completions, and the event is only for new ones.
        self.table.get(cq)?.has_new.set(false);
        Ok(is_waiting)
    }

    fn arm_solicited(&mut self, cq: CqId) -> Result<(), VerbsError> {
        let entry = self.table.get_mut(cq)?;
        // SAFETY: the queue is alive and has a channel.
        checked(unsafe { ops::ibv_req_notify_cq(entry.ptr, true) })?;
        entry.arming = Arming::Solicited;
        self.notices.watched.retain(|id| *id != cq);
        Ok(())
    }

    fn watch(&mut self, cq: CqId) -> Result<(), VerbsError> {
        let entry = self.table.get_mut(cq)?;
        if matches!(entry.arming, Arming::Watched | Arming::Armed) {
            return Ok(());
        }
        if !entry.moderation.period.is_zero() {
            // Only the device knows when to send the event.
            entry.has_new.set(false);
            self.arm(cq);
            return Ok(());
        }
        entry.arming = Arming::Watched;
        let watched = &mut self.notices.watched;
        watched.push_back(cq);
        if watched.len() > WATCHED
            && let Some(oldest) = watched.pop_front()
        {
            self.arm(oldest);
        }
        Ok(())
    }

    /// Arms a watched queue, since the events should be delayed from this point.
    pub(super) fn stop_watching(&mut self, cq: CqId) {
        if self
            .table
            .get(cq)
            .is_ok_and(|q| q.arming == Arming::Watched)
        {
            self.notices.watched.retain(|id| *id != cq);
            self.arm(cq);
        }
    }

    /// Polls all watched queues. Returns the number of queues with completions.
    pub(super) fn poll_watched(&mut self) -> usize {
        let mut watched = std::mem::take(&mut self.notices.watched);
        let before = watched.len();
        watched.retain(|cq| {
            let has_news = self.table.get(*cq).is_ok_and(Cq::has_news);
            if has_news {
                self.fire(*cq);
            }
            !has_news
        });
        let count = before - watched.len();
        self.notices.watched = watched;
        count
    }

    /// Arms all watched queues before a sleep. This will return `true` if there is already a
    /// completion.
    pub(super) fn arm_watched(&mut self) -> bool {
        while let Some(cq) = self.notices.watched.pop_front() {
            self.arm(cq);
        }
        self.notices.has_fired()
    }

    /// Arms a queue in the device. If this fails, or if a completion was added before it was armed,
    /// the queue fires immediately, because there won't be an event.
    fn arm(&mut self, cq: CqId) {
        let Ok(entry) = self.table.get_mut(cq) else {
            return;
        };
        entry.arming = Arming::Armed;
        // SAFETY: the queue is alive and has a channel.
        let armed = checked(unsafe { ops::ibv_req_notify_cq(entry.ptr, false) });
        if armed.is_err() || entry.has_news() {
            self.fire(cq);
        }
    }

    fn fire(&mut self, cq: CqId) {
        if let Ok(entry) = self.table.get_mut(cq) {
            entry.arming = Arming::Idle;
        }
        if !self.notices.fired.contains(&cq) {
            self.notices.fired.push_back(cq);
        }
    }

    /// Called when a queue has overrun. The library doesn't report this when the queue is polled,
    /// and there is no event for a user that is waiting for the next completion.
    pub(super) fn fail(&mut self, cq: CqId) {
        let Ok(entry) = self.table.get_mut(cq) else {
            return;
        };
        entry.overrun = true;
        let is_waiting = entry.arming != Arming::Idle;
        self.notices.watched.retain(|id| *id != cq);
        if is_waiting {
            self.fire(cq);
        }
    }

    /// Reads events from the channel. This will return the number of events.
    pub(super) fn reap_events(&mut self) -> usize {
        let mut count = 0;
        loop {
            let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: the channel is open and non-blocking. Both values are output parameters.
            let r = unsafe {
                (self.verbs.ibv_get_cq_event)(self.channel, &raw mut cq, &raw mut context)
            };
            if r != 0 {
                return count;
            }
            count += 1;
            let id = CqId(unpack(context as u64));
            // A queue can't be destroyed while it has unacknowledged events.
            let Ok(entry) = self.table.get_mut(id) else {
                continue;
            };
            entry.unacknowledged += 1;
            let is_full = entry.unacknowledged == ACK_BATCH;
            // The queue was armed earlier, but we have already found the completion by polling.
            let is_late = matches!(entry.arming, Arming::Idle | Arming::Watched);
            if is_full {
                self.acknowledge(id);
            }
            if !is_late {
                self.fire(id);
            }
        }
    }

    /// Acknowledges all events read from a queue, which is required before destroying it.
    pub(super) fn acknowledge(&mut self, cq: CqId) {
        let Ok(entry) = self.table.get_mut(cq) else {
            return;
        };
        let count = std::mem::take(&mut entry.unacknowledged);
        if count > 0 {
            // SAFETY: this is the number of events which have been read but not acknowledged.
            unsafe { (self.verbs.ibv_ack_cq_events)(entry.ptr, count) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use riser_rdma_core_sys::bindings::IBV_EVENT_CQ_ERR;

    use super::super::context::RdmaCoreDevice;
    use super::super::fake::{completion, library};
    use super::super::objects::pack;
    use super::super::shared::{Object, Occurrence};
    use super::*;
    use crate::verbs::{Provider, QpId, Verbs};

    /// Creates a device with a queue, and requests a notification for the next completion.
    fn watched() -> (RdmaCoreDevice, CqId, QpId) {
        let mut device = RdmaCoreDevice::fake();
        let (cq, qp) = device.fake_queues();
        assert_eq!(device.req_notify_cq(cq, Notify::Next), Ok(false));
        (device, cq, qp)
    }

    fn arms() -> usize {
        library(|library| library.arms)
    }

    fn poll_completions(device: &mut RdmaCoreDevice, cq: CqId) -> usize {
        device.poll_cq(cq, BATCH, &mut Vec::new()).unwrap()
    }

    #[test]
    fn awake_user_does_not_arm_queues() {
        let (mut device, cq, qp) = watched();
        for n in 0..100 {
            device.fake_message(cq, qp, n);
            assert_eq!(device.progress(Instant::now()), 1);
            assert_eq!(device.poll_cq_event(), Some(cq));
            assert_eq!(poll_completions(&mut device, cq), 1);
            assert_eq!(device.req_notify_cq(cq, Notify::Next), Ok(false));
            assert_eq!(device.poll_cq_event(), None, "once for each");
        }
        assert_eq!(arms(), 0);
        assert!(!device.arm_fds());
        assert!(!device.arm_fds(), "it is armed already");
        assert_eq!(arms(), 1);
    }

    #[test]
    fn completion_after_arming_wakes_user() {
        let (mut device, cq, qp) = watched();
        assert!(!device.arm_fds());
        device.fake_message(cq, qp, 7);
        assert_eq!(device.readable(), [true, false, false]);
        assert_eq!(device.progress(Instant::now()), 1);
        assert_eq!(device.poll_cq_event(), Some(cq));
        assert_eq!(poll_completions(&mut device, cq), 1);
        assert_eq!(device.readable(), [false; 3]);
    }

    /// The device does not generate an event if a completion is added between the last poll and
    /// arming the queue.
    #[test]
    fn completion_before_arming_keeps_user_awake() {
        let (mut device, cq, qp) = watched();
        device.fake_message(cq, qp, 1);
        poll_completions(&mut device, cq);
        device.progress(Instant::now());
        while device.poll_cq_event().is_some() {}
        assert_eq!(device.req_notify_cq(cq, Notify::Next), Ok(false));
        let number = device.fake_receive(qp, 2);
        library(|library| library.at_arming.push(completion(number)));
        assert!(device.arm_fds(), "a completion waits, and no event comes");
        assert_eq!(library(|library| library.events()), 0);
        assert!(device.deadline().is_some());
        assert_eq!(device.poll_cq_event(), Some(cq));
        assert_eq!(poll_completions(&mut device, cq), 1);
        // The queue is still armed, but its late event must not be reported to the application.
        device.fake_message(cq, qp, 3);
        assert_eq!(device.cqs.reap_events(), 1);
        assert_eq!(device.poll_cq_event(), None);
        assert_eq!(device.req_notify_cq(cq, Notify::Next), Ok(true));
    }

    #[test]
    fn peeked_completions_are_reported() {
        let (mut device, cq, qp) = watched();
        device.fake_message(cq, qp, 1);
        assert_eq!(device.peek_cq(cq, 9), Ok(1));
        assert!(device.arm_fds(), "the device raises no event for it");
        assert_eq!(device.poll_cq_event(), Some(cq));
        // No event is needed for existing completions.
        assert_eq!(device.req_notify_cq(cq, Notify::Next), Ok(true));
        device.progress(Instant::now());
        assert_eq!(device.poll_cq_event(), None);
        device.fake_message(cq, qp, 2);
        device.progress(Instant::now());
        assert_eq!(device.poll_cq_event(), Some(cq));
        assert_eq!(poll_completions(&mut device, cq), 2);
    }

    #[test]
    fn solicited_request_keeps_next_notification() {
        let (mut device, cq, qp) = watched();
        device.req_notify_cq(cq, Notify::Solicited).unwrap();
        assert_eq!(arms(), 0, "all completions are already requested");
        device.fake_message(cq, qp, 1);
        device.progress(Instant::now());
        assert_eq!(device.poll_cq_event(), Some(cq));
    }

    /// There is no event for a completion that was lost.
    #[test]
    fn overrun_queue_notifies_user() {
        for is_asleep in [false, true] {
            let (mut device, cq, _) = watched();
            if is_asleep {
                assert!(!device.arm_fds());
            }
            device.seat.report(Occurrence {
                event: IBV_EVENT_CQ_ERR,
                to: Object::Queue {
                    at: device.cqs.ptr(cq).unwrap() as usize,
                    context: pack(cq.0),
                },
            });
            device.progress(Instant::now());
            assert_eq!(device.poll_cq_event(), Some(cq));
            let polled = device.poll_cq(cq, 1, &mut Vec::new());
            assert_eq!(polled, Err(VerbsError::CqOverrun));
            device.progress(Instant::now());
            assert_eq!(device.poll_cq_event(), None);
        }
    }

    /// The queue has overrun before the user waits for it.
    #[test]
    fn overrun_queue_has_completions_when_armed() {
        let mut device = RdmaCoreDevice::fake();
        let (cq, _) = device.fake_queues();
        device.cqs.fail(cq);
        for notify in [Notify::Next, Notify::Solicited] {
            assert_eq!(device.req_notify_cq(cq, notify), Ok(true));
        }
    }

    #[test]
    fn longest_idle_queue_is_armed() {
        let mut device = RdmaCoreDevice::fake();
        let queues: Vec<_> = (0..WATCHED + 2).map(|_| device.fake_queues()).collect();
        for (cq, _) in &queues {
            device.req_notify_cq(*cq, Notify::Next).unwrap();
        }
        assert_eq!(arms(), 2);
        let (first, last) = (queues[0], queues[WATCHED]);
        for (cq, qp) in [first, last] {
            device.fake_message(cq, qp, 5);
        }
        let now = Instant::now() + Duration::from_millis(1);
        assert_eq!(device.progress(now), 2);
        assert_eq!(device.poll_cq_event(), Some(last.0));
        assert_eq!(device.poll_cq_event(), Some(first.0));
        assert_eq!(arms(), 2);
    }

    #[test]
    fn events_are_acknowledged_in_batches() {
        let (mut device, cq, qp) = watched();
        for n in 0..u64::from(ACK_BATCH) + 3 {
            assert!(!device.arm_fds());
            device.fake_message(cq, qp, n);
            assert_eq!(device.cqs.reap_events(), 1);
            assert_eq!(device.poll_cq_event(), Some(cq));
            poll_completions(&mut device, cq);
            device.req_notify_cq(cq, Notify::Next).unwrap();
        }
        let acknowledged = || library(|library| library.acknowledged.clone());
        assert_eq!(acknowledged(), [ACK_BATCH]);
        device.destroy_qp(qp).unwrap();
        device.destroy_cq(cq).unwrap();
        assert_eq!(acknowledged(), [ACK_BATCH, 3]);
        assert!(!device.arm_fds(), "nothing is left to arm");
    }
}
