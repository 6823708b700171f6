//! Requests of a channel that use a context, by number and by tag.

use std::ops::{Deref, DerefMut};

use riser_scsi::srp::Tag;
use riser_state::become_state;
use rustc_hash::{FxBuildHasher, FxHashMap};

use super::config::ChannelConfig;
use super::ioctx::{CommandToken, IoctxState, SendIoctx};
use crate::fabric::{Contexts, RdmaRequest, TaskIdx, TaskRef};
use crate::pool::{Buffer, Ranges};

/// Requests of a channel that use a context.
#[derive(Debug)]
pub(crate) struct RequestTable {
    contexts: Contexts<SendIoctx>,
    /// Commands without a response, by tag. Tags are chosen by the peer: collisions make lookups
    /// linear, but bounded by the credit limit.
    tags: FxHashMap<Tag, TaskIdx>,
    worker: u16,
    channel: u64,
}

impl Deref for RequestTable {
    type Target = Contexts<SendIoctx>;

    fn deref(&self) -> &Contexts<SendIoctx> {
        &self.contexts
    }
}

impl DerefMut for RequestTable {
    fn deref_mut(&mut self) -> &mut Contexts<SendIoctx> {
        &mut self.contexts
    }
}

impl RequestTable {
    /// Allocates the table of a new channel.
    pub(super) fn new(config: &ChannelConfig) -> Self {
        let requests = config.params.req_lim;
        // Twice the maximum number of entries: a table that is at most half full is never
        // reallocated.
        let tags = FxHashMap::with_capacity_and_hasher(2 * requests as usize, FxBuildHasher);
        Self {
            contexts: Contexts::new(requests as u16),
            tags,
            worker: config.worker,
            channel: config.serial,
        }
    }

    /// Stores a request in an unused context.
    ///
    /// # Panics
    /// If all numbers are in use.
    pub(super) fn insert_request(
        &mut self,
        context: Box<SendIoctx>,
        tag: Tag,
        state: IoctxState,
    ) -> TaskIdx {
        let (idx, io) = self.contexts.insert(context);
        become_state(&mut io.state, state);
        io.tag = tag;
        io.notify_success = false;
        io.notify_failure = false;
        io.exec.expected = riser_scsi::step::Expected::default();
        io.token = Some(CommandToken::taken_in());
        idx
    }

    /// Adds the tag of a command. Returns the older command with the same tag, if any, which keeps
    /// the tag.
    pub(super) fn insert_tag(&mut self, tag: Tag, idx: TaskIdx) -> Option<TaskIdx> {
        let older = self.tags.insert(tag, idx)?;
        self.tags.insert(tag, older);
        Some(older)
    }

    /// Removes the tag of a command.
    pub(super) fn remove_tag(&mut self, tag: Tag, idx: TaskIdx) {
        // The tag may refer to another command with the same tag.
        if let Some(named) = self.tags.remove(&tag)
            && named != idx
        {
            self.tags.insert(tag, named);
        }
    }

    /// Returns the state of a context.
    pub(crate) fn state(&self, idx: TaskIdx) -> IoctxState {
        let io = self.contexts.get(idx);
        io.map_or(IoctxState::Done, |io| io.state)
    }

    /// Returns the state of the request with this tag, if it exists.
    #[cfg(test)]
    pub(crate) fn task_state(&self, tag: u64) -> Option<IoctxState> {
        let mut contexts = self.contexts.iter();
        let found = contexts.find(|(_, io)| io.tag == Tag(tag));
        found.map(|(_, io)| io.state)
    }

    /// Returns the data buffer for the block operation of a context, if it needs one.
    pub(crate) fn data_buffer(&self, idx: TaskIdx) -> Option<&Buffer> {
        self.contexts[idx].exec.buffer.as_ref()
    }

    /// Returns the RDMA requests of the chain to be posted.
    pub(crate) fn rdma_requests(
        &self,
        idx: TaskIdx,
    ) -> impl Iterator<Item = RdmaRequest<Ranges<'_>>> {
        // A message initiated by the target does not have any RDMA requests.
        let mut requests = self.contexts.get(idx).and_then(SendIoctx::requests);
        // This is cheaper than an adapter that flattens the option.
        std::iter::from_fn(move || requests.as_mut()?.next())
    }

    /// Returns a reference to the current request of a context, for other channels.
    pub(super) fn task_ref(&self, idx: TaskIdx) -> TaskRef {
        TaskRef {
            worker: self.worker,
            channel: self.channel,
            index: idx,
            generation: self.contexts.generation(idx),
        }
    }
}
