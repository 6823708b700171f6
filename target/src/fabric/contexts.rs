//! Contexts of commands: those that a connection's commands have, and those that no command has.
//!
//! A connection has numbers for as many contexts as it may have commands under way. The memory of a
//! context is taken with its command, from those that the worker has to spare, and goes back there
//! with the command's end. So an idle session has none, and the sessions of a worker together have
//! as many as they have commands. No session can keep another from a context: a worker without
//! a spare one makes one, and how many a session may have is fixed by its login and counted in its
//! memory ([`Contexts::memory`]).

use std::ops::{Index, IndexMut};

use super::TaskIdx;

/// Contexts that a worker keeps for later at most. What it had beyond them, in a burst of many deep
/// sessions, is freed.
const KEPT: usize = 1024;

/// Contexts of one worker that no command has.
///
/// They were those of commands of any session, so what is left in them is never sent or used: who
/// takes one sets every field, and who gives one back has released what it held.
#[derive(Debug)]
pub struct Spare<T> {
    // Boxed, since a context must not move to another place for each command.
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
    /// Returns the memory of the contexts in bytes.
    #[must_use]
    pub fn memory(&self) -> usize {
        self.contexts.len() * size_of::<T>() + self.contexts.capacity() * size_of::<Box<T>>()
    }

    /// Takes the context that was used last, which may still be in the cache, or makes one.
    pub(crate) fn take(&mut self, make: impl FnOnce() -> T) -> Box<T> {
        self.contexts.pop().unwrap_or_else(|| Box::new(make()))
    }

    /// Takes a context back.
    pub(crate) fn put(&mut self, context: Box<T>) {
        if self.contexts.len() < KEPT {
            self.contexts.push(context);
        }
    }
}

/// The contexts of one connection, by their numbers.
#[derive(Debug)]
pub(crate) struct Contexts<T> {
    slots: Box<[Slot<T>]>,
    /// Numbers that no command has. A stack: what belongs to the number that was used last, as its
    /// place in a ring, may still be in the cache, and little of that is ever touched.
    idle: Vec<TaskIdx>,
}

#[derive(Debug)]
struct Slot<T> {
    /// Counts the uses of the number.
    generation: u32,
    context: Option<Box<T>>,
}

impl<T> Default for Contexts<T> {
    fn default() -> Self {
        Self::new(0)
    }
}

impl<T> Contexts<T> {
    /// Numbers for `bound` contexts.
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

    /// Bytes of memory of `bound` contexts, when commands have all of them.
    pub(crate) const fn memory(bound: usize) -> usize {
        bound * (size_of::<T>() + size_of::<Slot<T>>() + size_of::<TaskIdx>())
    }

    /// Contexts at most.
    pub(crate) fn bound(&self) -> usize {
        self.slots.len()
    }

    /// Contexts that commands have.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.idle.len()
    }

    /// Whether no command has a context.
    pub(crate) fn is_empty(&self) -> bool {
        self.idle.len() == self.slots.len()
    }

    /// Whether all have a command.
    pub(crate) fn is_full(&self) -> bool {
        self.idle.is_empty()
    }

    /// All numbers, for a loop that may end commands.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = TaskIdx> + use<T> {
        (0..self.slots.len() as u16).map(TaskIdx)
    }

    /// Enters a context for a command; returns its number.
    ///
    /// # Panics
    /// If all have a command.
    pub(crate) fn insert(&mut self, context: Box<T>) -> TaskIdx {
        let idx = self.idle.pop().expect("an idle context");
        let slot = &mut self.slots[usize::from(idx.0)];
        slot.generation = slot.generation.wrapping_add(1);
        slot.context = Some(context);
        idx
    }

    /// Removes the context of a command that has ended.
    ///
    /// # Panics
    /// If no command has it.
    pub(crate) fn remove(&mut self, idx: TaskIdx) -> Box<T> {
        let context = self.slots[usize::from(idx.0)].context.take();
        self.idle.push(idx);
        context.expect("a command ends once")
    }

    /// The number of times that a number was used.
    pub(crate) fn generation(&self, idx: TaskIdx) -> u32 {
        self.slots[usize::from(idx.0)].generation
    }

    /// A context, if a command has it.
    pub(crate) fn get(&self, idx: TaskIdx) -> Option<&T> {
        self.slots.get(usize::from(idx.0))?.context.as_deref()
    }

    /// As [`Contexts::get`], to change.
    pub(crate) fn get_mut(&mut self, idx: TaskIdx) -> Option<&mut T> {
        self.slots
            .get_mut(usize::from(idx.0))?
            .context
            .as_deref_mut()
    }

    /// A context, if the use that is meant has not ended: mail that names it may be late.
    pub(crate) fn of_use(&mut self, idx: TaskIdx, generation: u32) -> Option<&mut T> {
        let slot = self.slots.get_mut(usize::from(idx.0))?;
        let is_meant = slot.generation == generation;
        slot.context.as_deref_mut().filter(|_| is_meant)
    }

    /// The contexts that commands have, with their numbers.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (TaskIdx, &T)> {
        let all = (0..).map(TaskIdx).zip(&self.slots);
        all.filter_map(|(idx, slot)| Some((idx, slot.context.as_deref()?)))
    }
}

/// By the number of a context that a command has.
impl<T> Index<usize> for Contexts<T> {
    type Output = T;

    fn index(&self, at: usize) -> &T {
        let context = self.slots[at].context.as_deref();
        context.expect("a command has the context")
    }
}

impl<T> IndexMut<usize> for Contexts<T> {
    fn index_mut(&mut self, at: usize) -> &mut T {
        let context = self.slots[at].context.as_deref_mut();
        context.expect("a command has the context")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_connection_has_no_context_and_others_get_what_it_had() {
        let mut spare = Spare::default();
        let (mut one, mut other) = (Contexts::new(2), Contexts::new(2));
        let first = one.insert(spare.take(|| 7));
        assert_eq!(
            (first, one.len(), one.generation(first)),
            (TaskIdx(0), 1, 1)
        );
        spare.put(one.remove(first));
        assert!(one.is_empty() && one.get(first).is_none() && one.iter().next().is_none());
        let second = other.insert(spare.take(|| unreachable!("there is one to spare")));
        assert_eq!(other[usize::from(second.0)], 7);
        // A use that has ended is not the next one of the same number.
        let again = one.insert(spare.take(|| 8));
        assert_eq!((again, one.generation(again)), (first, 2));
        assert!(one.of_use(again, 1).is_none());
        assert_eq!(one.of_use(again, 2), Some(&mut 8));
        one.insert(spare.take(|| 9));
        assert!(one.is_full() && !other.is_full());
        let found: Vec<_> = one.iter().map(|(idx, context)| (idx.0, *context)).collect();
        assert_eq!(found, [(0, 8), (1, 9)]);
    }

    #[test]
    fn what_is_kept_for_later_is_bounded() {
        let mut spare = Spare::default();
        for n in 0..2 * KEPT {
            spare.put(Box::new(n));
        }
        assert_eq!(spare.contexts.len(), KEPT);
    }
}
