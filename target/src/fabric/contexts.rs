//! Command contexts: contexts in use by commands of a connection, and spare contexts.
//!
//! A connection has as many context numbers as the maximum number of concurrent commands. The
//! memory of a context is allocated for a command from the worker's spare contexts, and returned
//! when the command completes. An idle session therefore does not use any contexts, and all
//! sessions of a worker together use as many as they have commands. A session cannot prevent
//! another session from getting a context: if there are no spare contexts, the worker allocates a
//! new one. The maximum number of contexts of a session is determined by its login and included in
//! its memory usage ([`Contexts::memory`]).

use std::ops::{Index, IndexMut};

use super::TaskIdx;

/// Maximum number of spare contexts kept by a worker. After a burst in many sessions with deep
/// queues, all other contexts are freed.
const KEPT: usize = 1024;

/// Spare contexts of a worker.
///
/// They were previously used by commands of any session. Their old contents must never be used or
/// sent, so all fields must be set when a context is allocated, and all resources must be released
/// before it is returned.
#[derive(Debug)]
pub struct Spare<T> {
    // Boxed, to avoid copying a context for each command.
    contexts: Vec<Box<T>>,
}

impl<T> Default for Spare<T> {
    fn default() -> Self {
        Self {
            contexts: Vec::new(),
        }
    }
}

impl<T> Spare<T> {
    /// Returns the memory usage in bytes.
    #[must_use]
    pub fn memory(&self) -> usize {
        self.contexts.len() * size_of::<T>() + self.contexts.capacity() * size_of::<Box<T>>()
    }

    /// Returns the most recently used context, which may still be in the cache, or allocates a new
    /// one.
    pub(crate) fn take_context(&mut self, make: impl FnOnce() -> T) -> Box<T> {
        self.contexts.pop().unwrap_or_else(|| Box::new(make()))
    }

    /// Returns a context to the spare contexts.
    pub(crate) fn return_context(&mut self, context: Box<T>) {
        if self.contexts.len() < KEPT {
            self.contexts.push(context);
        }
    }
}

/// Contexts of a connection by number.
#[derive(Debug)]
pub(crate) struct Contexts<T> {
    slots: Box<[Slot<T>]>,
    /// Unused numbers. This is a stack, because data of the most recently used number, such as its
    /// slot in a ring, may still be in the cache. It also limits the number of slots that are ever
    /// accessed.
    idle: Vec<TaskIdx>,
}

#[derive(Debug)]
struct Slot<T> {
    /// Counts the uses of this number.
    generation: u32,
    context: Option<Box<T>>,
}

impl<T> Default for Contexts<T> {
    fn default() -> Self {
        Self::new(0)
    }
}

impl<T> Contexts<T> {
    /// Creates numbers for `bound` contexts.
    pub(crate) fn new(bound: u16) -> Self {
        let slot = |_| Slot {
            generation: 0,
            context: None,
        };
        Self {
            slots: (0..bound).map(slot).collect(),
            idle: (0..bound).rev().map(TaskIdx).collect(),
        }
    }

    /// Returns the memory usage of `bound` contexts in bytes, if all of them are in use.
    pub(crate) const fn memory(bound: usize) -> usize {
        bound * (size_of::<T>() + size_of::<Slot<T>>() + size_of::<TaskIdx>())
    }

    /// Returns the maximum number of contexts.
    pub(crate) fn bound(&self) -> usize {
        self.slots.len()
    }

    /// Returns the number of contexts in use.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.idle.len()
    }

    /// Returns whether no contexts are in use.
    pub(crate) fn is_empty(&self) -> bool {
        self.idle.len() == self.slots.len()
    }

    /// Returns whether all contexts are in use.
    pub(crate) fn is_full(&self) -> bool {
        self.idle.is_empty()
    }

    /// Returns all numbers, for a loop that may complete commands.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = TaskIdx> + use<T> {
        (0..self.slots.len() as u16).map(TaskIdx)
    }

    /// Adds a context for a command, and returns it with its number.
    ///
    /// # Panics
    /// Panics if all numbers are in use.
    pub(crate) fn insert(&mut self, context: Box<T>) -> (TaskIdx, &mut T) {
        let idx = self.idle.pop().expect("an idle context");
        let slot = &mut self.slots[usize::from(idx.0)];
        slot.generation = slot.generation.wrapping_add(1);
        (idx, slot.context.insert(context))
    }

    /// Removes the context of a completed command.
    ///
    /// # Panics
    /// Panics if the number is not in use.
    pub(crate) fn remove(&mut self, idx: TaskIdx) -> Box<T> {
        let context = self.slots[usize::from(idx.0)].context.take();
        self.idle.push(idx);
        context.expect("a command ends once")
    }

    /// Returns the generation of a number, which counts its uses.
    pub(crate) fn generation(&self, idx: TaskIdx) -> u32 {
        self.slots[usize::from(idx.0)].generation
    }

    /// Returns the context of a number in use.
    pub(crate) fn get(&self, idx: TaskIdx) -> Option<&T> {
        self.slots.get(usize::from(idx.0))?.context.as_deref()
    }

    /// Returns the mutable context of a number in use.
    pub(crate) fn get_mut(&mut self, idx: TaskIdx) -> Option<&mut T> {
        self.slots
            .get_mut(usize::from(idx.0))?
            .context
            .as_deref_mut()
    }

    /// Returns the context if it is still in its use `generation`. A message for a previous use may
    /// arrive late.
    pub(crate) fn of_use(&mut self, idx: TaskIdx, generation: u32) -> Option<&mut T> {
        let slot = self.slots.get_mut(usize::from(idx.0))?;
        let is_meant = slot.generation == generation;
        slot.context.as_deref_mut().filter(|_| is_meant)
    }

    /// Returns the contexts in use, with their numbers.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (TaskIdx, &T)> {
        let all = (0..).map(TaskIdx).zip(&self.slots);
        all.filter_map(|(idx, slot)| Some((idx, slot.context.as_deref()?)))
    }
}

/// Indexed by the number of a context in use.
impl<T> Index<TaskIdx> for Contexts<T> {
    type Output = T;

    #[inline]
    fn index(&self, idx: TaskIdx) -> &T {
        let context = self.slots[usize::from(idx.0)].context.as_deref();
        context.expect("a command has the context")
    }
}

impl<T> IndexMut<TaskIdx> for Contexts<T> {
    #[inline]
    fn index_mut(&mut self, idx: TaskIdx) -> &mut T {
        let context = self.slots[usize::from(idx.0)].context.as_deref_mut();
        context.expect("a command has the context")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_contexts_are_shared_between_connections() {
        let mut spare = Spare::default();
        let (mut one, mut other) = (Contexts::new(2), Contexts::new(2));
        let (first, _) = one.insert(spare.take_context(|| 7));
        assert_eq!(
            (first, one.len(), one.generation(first)),
            (TaskIdx(0), 1, 1)
        );
        spare.return_context(one.remove(first));
        assert!(one.is_empty() && one.get(first).is_none() && one.iter().next().is_none());
        let (second, _) =
            other.insert(spare.take_context(|| unreachable!("there is one to spare")));
        assert_eq!(other[second], 7);
        // The previous use of the same number has a different generation.
        let (again, _) = one.insert(spare.take_context(|| 8));
        assert_eq!((again, one.generation(again)), (first, 2));
        assert!(one.of_use(again, 1).is_none());
        assert_eq!(one.of_use(again, 2), Some(&mut 8));
        one.insert(spare.take_context(|| 9));
        assert!(one.is_full() && !other.is_full());
        let found: Vec<_> = one.iter().map(|(idx, context)| (idx.0, *context)).collect();
        assert_eq!(found, [(0, 8), (1, 9)]);
    }

    #[test]
    fn spare_contexts_are_bounded() {
        let mut spare = Spare::default();
        for n in 0..2 * KEPT {
            spare.return_context(Box::new(n));
        }
        assert_eq!(spare.contexts.len(), KEPT);
    }
}
