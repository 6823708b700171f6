//! Notifications of completion queues, without a system call while there is work.
//!
//! To arm a queue in the device, to look whether its event has come and to read that are system
//! calls, or a write to the device at best. A user that is awake needs none of them: a queue for
//! which it has asked for a notification is *watched*, that is, polled by
//! [`progress`](crate::verbs::Provider::progress) in the user's own memory. The device is armed for
//! it before a sleep ([`arm_fds`](crate::verbs::Provider::arm_fds)), and polled once more after
//! that, since a completion that comes before the arming raises no event.
//!
//! ```text
//! Idle → Watched → Armed
//!  ↑ ↑______│        │
//!  └─────────────────┘
//! ```
//!
//! A queue whose events are to wait for further completions is armed at once: only the device can
//! count and wait.
//!
//! # Bounds
//! [`WATCHED`] queues are watched: beyond that the one that has been without a completion for
//! longest is armed, so that many idle connections do not slow down each round of a busy one. A
//! device is looked at in each round without work, and under load once in a while ([`Notices`]).

use std::collections::VecDeque;

use riser_rdma_core_sys::bindings::{
    IBV_WC_SUCCESS, IBV_WC_WITH_IMM, IBV_WC_WITH_INV, ibv_cq_ex, ibv_wc,
};
use riser_rdma_core_sys::ops;

use super::convert::checked;
use super::notices::Arming;
#[cfg(doc)]
use super::notices::Notices;
use super::objects::{BATCH, Cq, RdmaCoreDevice, Times, unpack};
use crate::verbs::{CqId, Notify, VerbsError};

/// Queues that are polled in each round at most. A poll of an empty queue reads one word of memory.
const WATCHED: usize = 64;

/// Events of a queue that are acknowledged together. The library takes a lock for that, and wakes
/// who waits for it.
const ACK_BATCH: u32 = 64;

impl Cq {
    /// Takes completions out of the library for later polls, at most a batch; answers how many.
    ///
    /// # Errors
    /// [`VerbsError::CqOverrun`], for a negative answer: the queue cannot be read any more.
    pub(super) fn pull(&self, most: usize) -> Result<usize, VerbsError> {
        let mut batch = self.batch.borrow_mut();
        let most = most.min(batch.len());
        let n = match &self.times {
            // SAFETY: the queue is alive; the batch has room for as many as are asked for.
            None => unsafe { ops::ibv_poll_cq(self.ptr, most as i32, batch.as_mut_ptr()) },
            Some(times) => self.pull_timed(&mut batch[..most], &mut times.borrow_mut()),
        };
        let n = usize::try_from(n).map_err(|_| VerbsError::CqOverrun)?;
        if n > most {
            // No library does; what it has written where is not known then.
            return Err(VerbsError::CqOverrun);
        }
        if n > 0 {
            let found = batch[..n].iter_mut().map(std::mem::take);
            self.peeked.borrow_mut().extend(found);
            self.has_new.set(true);
        }
        Ok(n)
    }

    /// Takes completions one by one, each with its times; answers how many, or a negative number.
    fn pull_timed(&self, batch: &mut [ibv_wc], times: &mut VecDeque<Times>) -> i32 {
        let cq = self.ptr.cast::<ibv_cq_ex>();
        let mut count = 0;
        for place in batch {
            // SAFETY: a queue with times is an extended one, and is alive; a batch is under way from
            // the first completion on.
            let found = unsafe {
                match count {
                    0 => ops::ibv_start_poll(cq),
                    _ => ops::ibv_next_poll(cq),
                }
            };
            match found {
                0 => {}
                // What has come before the failure is read first: the next call fails again.
                _ if count > 0 => break,
                libc::ENOENT => return 0,
                _ => return -1,
            }
            // SAFETY: the batch stands at a completion.
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
            // SAFETY: a batch has begun, and ends here.
            unsafe { ops::ibv_end_poll(cq) };
        }
        count
    }

    /// Whether the user is to poll the queue: a completion has come since it asked for a
    /// notification, or the poll is to report an error.
    fn has_news(&self) -> bool {
        let held = self.peeked.borrow().len();
        // What the user has not taken from earlier is left there, and no more is added to it than
        // a batch.
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

/// The completion at which a batch stands. Of a failed request only number, status and queue pair are
/// valid (ibv_poll_cq(3)).
///
/// # Safety
/// The queue is alive and its batch stands at a completion.
unsafe fn current(cq: *mut ibv_cq_ex) -> ibv_wc {
    // SAFETY: as the caller promises.
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

impl RdmaCoreDevice {
    /// Sees to one event for the next completion; answers whether completions wait already.
    pub(super) fn request_notice(&mut self, cq: CqId, notify: Notify) -> Result<bool, VerbsError> {
        let arming = self.cqs.get(cq)?.arming;
        match notify {
            // Any completion is asked for already, which this does not weaken (IBTA 11.4.2.2).
            Notify::Solicited if matches!(arming, Arming::Watched | Arming::Armed) => {}
            // Only the device knows which messages are solicited.
            Notify::Solicited => self.arm_solicited(cq)?,
            Notify::Next | Notify::Count(_) => self.watch(cq)?,
        }
        let is_waiting = self.peek(cq, 1)? > 0;
        // The answer reports what is there; the event is for what comes.
        self.cqs.get(cq)?.has_new.set(false);
        Ok(is_waiting)
    }

    fn arm_solicited(&mut self, cq: CqId) -> Result<(), VerbsError> {
        let entry = self.cqs.get_mut(cq)?;
        // SAFETY: the queue is alive and has a channel.
        checked(unsafe { ops::ibv_req_notify_cq(entry.ptr, true) })?;
        entry.arming = Arming::Solicited;
        self.notices.watched.retain(|id| *id != cq);
        Ok(())
    }

    fn watch(&mut self, cq: CqId) -> Result<(), VerbsError> {
        let entry = self.cqs.get_mut(cq)?;
        if matches!(entry.arming, Arming::Watched | Arming::Armed) {
            return Ok(());
        }
        if !entry.moderation.period.is_zero() {
            // Only the device knows how long its event is to wait.
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

    /// Arms a queue that was watched, since its events are to wait from now on.
    pub(super) fn stop_watching(&mut self, cq: CqId) {
        if self.cqs.get(cq).is_ok_and(|q| q.arming == Arming::Watched) {
            self.notices.watched.retain(|id| *id != cq);
            self.arm(cq);
        }
    }

    /// Polls the queues that are watched; answers how many have fired.
    pub(super) fn poll_watched(&mut self) -> usize {
        if self.gone {
            // No completion of it is of use any more.
            return 0;
        }
        let mut watched = std::mem::take(&mut self.notices.watched);
        let before = watched.len();
        watched.retain(|cq| {
            let has_news = self.cqs.get(*cq).is_ok_and(Cq::has_news);
            if has_news {
                self.fire(*cq);
            }
            !has_news
        });
        let count = before - watched.len();
        self.notices.watched = watched;
        count
    }

    /// Arms the queues that are watched, before a sleep; whether one has fired instead.
    pub(super) fn arm_watched(&mut self) -> bool {
        if self.gone {
            return false;
        }
        while let Some(cq) = self.notices.watched.pop_front() {
            self.arm(cq);
        }
        self.notices.has_fired()
    }

    /// Arms a queue in the device. It fires at once where it cannot be armed, or where a completion
    /// came before it was: no event would report that.
    fn arm(&mut self, cq: CqId) {
        let Ok(entry) = self.cqs.get_mut(cq) else {
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
        if let Ok(entry) = self.cqs.get_mut(cq) {
            entry.arming = Arming::Idle;
        }
        if !self.notices.fired.contains(&cq) {
            self.notices.fired.push_back(cq);
        }
    }

    /// Takes events from the channel; answers how many.
    pub(super) fn reap_cq_events(&mut self) -> usize {
        let mut count = 0;
        loop {
            let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: the channel is open and does not block; both results are written.
            let r = unsafe {
                (self.core.verbs.ibv_get_cq_event)(self.comp, &raw mut cq, &raw mut context)
            };
            if r != 0 {
                return count;
            }
            count += 1;
            let id = CqId(unpack(context as u64));
            // A queue is there as long as an event of it is not acknowledged.
            let Ok(entry) = self.cqs.get_mut(id) else {
                continue;
            };
            entry.unacknowledged += 1;
            let is_full = entry.unacknowledged == ACK_BATCH;
            // Of an earlier arming, whose completion a poll has found first.
            let is_late = matches!(entry.arming, Arming::Idle | Arming::Watched);
            if is_full {
                self.acknowledge(id);
            }
            if !is_late {
                self.fire(id);
            }
        }
    }

    /// Acknowledges the events that were read from a queue; its destruction waits for that.
    pub(super) fn acknowledge(&mut self, cq: CqId) {
        let Ok(entry) = self.cqs.get_mut(cq) else {
            return;
        };
        let count = std::mem::take(&mut entry.unacknowledged);
        if count > 0 {
            // SAFETY: this number of events was read from the queue and not acknowledged.
            unsafe { (self.core.verbs.ibv_ack_cq_events)(entry.ptr, count) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::super::fake::{completion, library};
    use super::*;
    use crate::verbs::{Provider, QpId, Verbs};

    /// A device with a queue for whose next completion it is asked.
    fn watched() -> (RdmaCoreDevice, CqId, QpId) {
        let mut device = RdmaCoreDevice::fake();
        let (cq, qp) = device.fake_queues();
        assert_eq!(device.req_notify_cq(cq, Notify::Next), Ok(false));
        (device, cq, qp)
    }

    fn arms() -> usize {
        library(|library| library.arms)
    }

    fn take(device: &mut RdmaCoreDevice, cq: CqId) -> usize {
        device.poll_cq(cq, BATCH, &mut Vec::new()).unwrap()
    }

    #[test]
    fn a_user_that_is_awake_arms_nothing() {
        let (mut device, cq, qp) = watched();
        for n in 0..100 {
            device.fake_message(cq, qp, n);
            assert_eq!(device.progress(Instant::now()), 1);
            assert_eq!(device.poll_cq_event(), Some(cq));
            assert_eq!(take(&mut device, cq), 1);
            assert_eq!(device.req_notify_cq(cq, Notify::Next), Ok(false));
            assert_eq!(device.poll_cq_event(), None, "once for each");
        }
        assert_eq!(arms(), 0);
        assert!(!device.arm_fds());
        assert!(!device.arm_fds(), "it is armed already");
        assert_eq!(arms(), 1);
    }

    #[test]
    fn a_sleeper_is_woken_by_what_comes_after_the_arming() {
        let (mut device, cq, qp) = watched();
        assert!(!device.arm_fds());
        device.fake_message(cq, qp, 7);
        assert_eq!(device.readable(), [true, false, false]);
        assert_eq!(device.progress(Instant::now()), 1);
        assert_eq!(device.poll_cq_event(), Some(cq));
        assert_eq!(take(&mut device, cq), 1);
        assert_eq!(device.readable(), [false; 3]);
    }

    /// The window between the last poll and the arming, in which the device raises no event.
    #[test]
    fn what_comes_before_the_arming_keeps_its_user_awake() {
        let (mut device, cq, qp) = watched();
        device.fake_message(cq, qp, 1);
        take(&mut device, cq);
        device.progress(Instant::now());
        while device.poll_cq_event().is_some() {}
        assert_eq!(device.req_notify_cq(cq, Notify::Next), Ok(false));
        let number = device.fake_receive(qp, 2);
        library(|library| library.at_arming.push(completion(number)));
        assert!(device.arm_fds(), "a completion waits, and no event comes");
        assert_eq!(library(|library| library.events()), 0);
        assert!(device.deadline().is_some());
        assert_eq!(device.poll_cq_event(), Some(cq));
        assert_eq!(take(&mut device, cq), 1);
        // The queue is armed all the same, and its late event is none for the user.
        device.fake_message(cq, qp, 3);
        assert_eq!(device.reap_cq_events(), 1);
        assert_eq!(device.poll_cq_event(), None);
        assert_eq!(device.req_notify_cq(cq, Notify::Next), Ok(true));
    }

    #[test]
    fn completions_that_a_look_has_taken_out_are_reported_too() {
        let (mut device, cq, qp) = watched();
        device.fake_message(cq, qp, 1);
        assert_eq!(device.peek_cq(cq, 9), Ok(1));
        assert!(device.arm_fds(), "the device raises no event for it");
        assert_eq!(device.poll_cq_event(), Some(cq));
        // What was there when the user asked needs no event.
        assert_eq!(device.req_notify_cq(cq, Notify::Next), Ok(true));
        device.progress(Instant::now());
        assert_eq!(device.poll_cq_event(), None);
        device.fake_message(cq, qp, 2);
        device.progress(Instant::now());
        assert_eq!(device.poll_cq_event(), Some(cq));
        assert_eq!(take(&mut device, cq), 2);
    }

    #[test]
    fn a_solicited_notification_does_not_weaken_one_for_the_next() {
        let (mut device, cq, qp) = watched();
        device.req_notify_cq(cq, Notify::Solicited).unwrap();
        assert_eq!(arms(), 0, "any completion is asked for already");
        device.fake_message(cq, qp, 1);
        device.progress(Instant::now());
        assert_eq!(device.poll_cq_event(), Some(cq));
    }

    #[test]
    fn of_many_queues_the_longest_idle_is_armed_and_still_heard() {
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
    fn events_are_acknowledged_together_and_before_the_queue_goes() {
        let (mut device, cq, qp) = watched();
        for n in 0..u64::from(ACK_BATCH) + 3 {
            assert!(!device.arm_fds());
            device.fake_message(cq, qp, n);
            assert_eq!(device.reap_cq_events(), 1);
            assert_eq!(device.poll_cq_event(), Some(cq));
            take(&mut device, cq);
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
