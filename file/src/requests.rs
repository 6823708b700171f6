//! [`Requests`]: the active requests of a driver, and lists of those waiting for something other
//! than an operation.

use std::collections::VecDeque;
use std::ops::{Index, IndexMut};
use std::time::{Duration, Instant};

use riser_memory::MemSlice;
use riser_state::become_state;
use slab::Slab;

use super::request::{Request, RequestState};

/// Interval to retry requests held by an injected fault.
const HELD: Duration = Duration::from_millis(2);

/// Active requests of a driver, by index. The lists always correspond to the states: see
/// [`Requests::change_state`].
pub(super) struct Requests<E> {
    slab: Slab<Request<E>>,
    /// Requests in [`RequestState::Stalled`], oldest first. Limited to the depth of the driver.
    stalled: VecDeque<usize>,
    /// Requests in [`RequestState::Delayed`], [`RequestState::Held`] and [`RequestState::Turn`].
    delayed: Vec<usize>,
    /// Empty lists with their capacity, two for each completed request, at most twice the depth.
    spare: Vec<Vec<MemSlice>>,
}

impl<E> Index<usize> for Requests<E> {
    type Output = Request<E>;

    fn index(&self, index: usize) -> &Request<E> {
        &self.slab[index]
    }
}

impl<E> IndexMut<usize> for Requests<E> {
    fn index_mut(&mut self, index: usize) -> &mut Request<E> {
        &mut self.slab[index]
    }
}

impl<E> Requests<E> {
    /// Creates the lists for up to `depth` requests.
    pub(super) fn new(depth: usize) -> Self {
        Self {
            slab: Slab::with_capacity(depth),
            stalled: VecDeque::with_capacity(depth),
            delayed: Vec::new(),
            spare: Vec::new(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.slab.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, &Request<E>)> {
        self.slab.iter()
    }

    /// Returns an empty list for a new request, with the memory of a previous one if possible.
    pub(super) fn spare_list(&mut self) -> Vec<MemSlice> {
        self.spare.pop().unwrap_or_default()
    }

    /// Returns whether a request has completed, because this keeps its lists for the next request.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn has_spare_lists(&self) -> bool {
        !self.spare.is_empty()
    }

    /// Adds a request in state [`RequestState::New`].
    pub(super) fn insert(&mut self, request: Request<E>) -> usize {
        self.slab.insert(request)
    }

    /// Changes the state of a request, and adds it to the corresponding list. It must not be in a
    /// list.
    pub(super) fn change_state(&mut self, index: usize, next: RequestState) {
        become_state(&mut self.slab[index].state, next);
        match next {
            RequestState::Stalled => self.stalled.push_back(index),
            RequestState::Delayed { .. } | RequestState::Held | RequestState::Turn => {
                self.delayed.push(index);
            }
            RequestState::New
            | RequestState::Ring
            | RequestState::Helper
            | RequestState::Flush
            | RequestState::Done => {}
        }
    }

    /// Returns the number of stalled requests.
    pub(super) fn stalled(&self) -> usize {
        self.stalled.len()
    }

    /// Removes the oldest stalled request from its list, to be continued.
    pub(super) fn next_stalled(&mut self) -> Option<usize> {
        self.stalled.pop_front()
    }

    /// Removes all delayed requests from their list. Each must be continued, or passed to
    /// [`Requests::keep_delayed`].
    pub(super) fn take_delayed(&mut self) -> Vec<usize> {
        std::mem::take(&mut self.delayed)
    }

    /// Returns true if any request is delayed, held or waiting for its turn.
    pub(super) fn has_delayed(&self) -> bool {
        !self.delayed.is_empty()
    }

    /// Adds a request again that is still waiting for the same reason.
    pub(super) fn keep_delayed(&mut self, index: usize) {
        self.delayed.push(index);
    }

    /// Removes a canceled request from its list.
    pub(super) fn unlist(&mut self, index: usize) {
        self.stalled.retain(|&listed| listed != index);
        self.delayed.retain(|&listed| listed != index);
    }

    /// Returns the time when delayed requests must be checked.
    pub(super) fn deadline(&self, now: Instant) -> Option<Instant> {
        let times = self
            .delayed
            .iter()
            .filter_map(|&index| match self.slab[index].state {
                RequestState::Delayed { until, .. } => Some(until),
                RequestState::Held => Some(now + HELD),
                // The waker of its worker is used.
                _ => None,
            });
        times.min()
    }

    /// Removes a completed request, and keeps the memory of its lists.
    pub(super) fn complete(&mut self, index: usize) -> Request<E> {
        let mut request = self.slab.remove(index);
        become_state(&mut request.state, RequestState::Done);
        for list in [&mut request.data, &mut request.window] {
            let mut list = std::mem::take(list);
            // Drop the references to the caller's memory now instead of when the list is reused,
            // because the buffers of a session would outlive it.
            list.clear();
            self.spare.push(list);
        }
        request
    }
}

#[cfg(test)]
mod tests {
    use riser_block::{Command, CommandKind};

    use super::super::plan::Stage;
    use super::super::request::StoreId;
    use super::*;

    fn requests() -> (Requests<()>, Instant) {
        (Requests::new(8), Instant::now())
    }

    fn insert(requests: &mut Requests<()>, now: Instant) -> usize {
        let op = Command::new(CommandKind::Flush, 0, 0);
        let lists = (requests.spare_list(), requests.spare_list());
        let request = Request::new(7, StoreId(0), now, op, lists, Stage::SyncLast);
        requests.insert(request)
    }

    #[test]
    fn lists_follow_states() {
        let (mut requests, now) = requests();
        let [first, second, third] = [(); 3].map(|()| insert(&mut requests, now));
        requests.change_state(first, RequestState::Stalled);
        requests.change_state(second, RequestState::Stalled);
        requests.change_state(third, RequestState::Turn);
        assert_eq!((requests.stalled(), requests.has_delayed()), (2, true));
        assert_eq!(requests.next_stalled(), Some(first));
        requests.change_state(first, RequestState::Stalled);
        assert_eq!(requests.next_stalled(), Some(second), "oldest first");
        requests.unlist(first);
        assert_eq!(requests.next_stalled(), None);
        assert_eq!(requests.take_delayed(), [third]);
        requests.keep_delayed(third);
        requests.unlist(third);
        assert!(!requests.has_delayed());
    }

    #[test]
    fn deadline_is_earliest_delay() {
        let (mut requests, now) = requests();
        let [turn, held, delayed] = [(); 3].map(|()| insert(&mut requests, now));
        requests.change_state(turn, RequestState::Turn);
        assert_eq!(requests.deadline(now), None, "it is woken");
        requests.change_state(held, RequestState::Held);
        assert_eq!(requests.deadline(now), Some(now + HELD));
        let until = now + HELD / 2;
        requests.change_state(delayed, RequestState::Delayed { until });
        assert_eq!(requests.deadline(now), Some(until));
    }

    #[test]
    fn completed_request_keeps_list_memory() {
        let (mut requests, now) = requests();
        let index = insert(&mut requests, now);
        assert!(!requests.has_spare_lists());
        requests.change_state(index, RequestState::Ring);
        assert_eq!(requests.complete(index).user, 7);
        assert!(requests.has_spare_lists());
        assert_eq!(requests.len(), 0);
    }
}
