//! Table of objects identified by generation-checked handles.
//!
//! When an object is removed, its slot gets a new generation, so old handles are no longer valid.
//! Free slots are reused in the order they were freed, so that it takes as long as possible until a
//! slot is used again.
//!
//! The maximum size is set at creation.

use std::collections::VecDeque;
use std::marker::PhantomData;

use crate::verbs::{Handle, VerbsError};

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

/// Table of objects of type `T` identified by IDs of type `I`.
#[derive(Debug)]
pub(crate) struct Table<I, T> {
    name: &'static str,
    slots: Vec<Slot<T>>,
    free: VecDeque<u32>,
    limit: u32,
    len: u32,
    ids: PhantomData<fn() -> I>,
}

impl<I, T> Table<I, T>
where
    I: From<Handle> + Into<Handle> + Copy,
{
    /// Creates an empty table for up to `limit` objects. `name` is used in error messages.
    pub(crate) fn new(name: &'static str, limit: u32) -> Self {
        Self {
            name,
            slots: Vec::new(),
            free: VecDeque::new(),
            limit,
            len: 0,
            ids: PhantomData,
        }
    }

    /// Returns the number of objects in the table.
    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }

    /// Returns true if the table is full.
    pub(crate) fn is_full(&self) -> bool {
        self.len >= self.limit
    }

    /// Checks if there is space in the table. Used before creating the resources for an object, so
    /// that this doesn't need to be reverted.
    ///
    /// # Errors
    /// [`VerbsError::InsufficientResources`] if the table is full.
    pub(crate) fn check_room(&self) -> Result<(), VerbsError> {
        if self.is_full() {
            return Err(VerbsError::InsufficientResources(self.name));
        }
        Ok(())
    }

    /// Inserts an object and returns its ID.
    ///
    /// # Errors
    /// [`VerbsError::InsufficientResources`] if the table is full.
    pub(crate) fn insert(&mut self, value: T) -> Result<I, VerbsError> {
        self.check_room()?;
        self.len += 1;
        // We create 64 slots before reusing any of them, so that it also takes some time in small
        // tables until a slot is used again. After this, we prefer free slots to keep the table
        // small.
        if (self.slots.len() as u32) < self.limit.min(64) || self.free.is_empty() {
            let index = self.slots.len() as u32;
            self.slots.push(Slot {
                generation: 1,
                value: Some(value),
            });
            return Ok(Handle::new(index, 1).into());
        }
        let index = self.free.pop_front().expect("free list is not empty");
        let slot = &mut self.slots[index as usize];
        debug_assert!(slot.value.is_none());
        slot.value = Some(value);
        Ok(Handle::new(index, slot.generation).into())
    }

    fn slot(&self, id: I) -> Option<&Slot<T>> {
        let h: Handle = id.into();
        self.slots
            .get(h.index())
            .filter(|s| s.generation == h.generation())
    }

    /// Returns the object for an ID.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`] if the ID is invalid.
    pub(crate) fn get(&self, id: I) -> Result<&T, VerbsError> {
        self.slot(id)
            .and_then(|s| s.value.as_ref())
            .ok_or(VerbsError::InvalidHandle(self.name))
    }

    /// Returns a mutable reference to the object for an ID.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`] if the ID is invalid.
    pub(crate) fn get_mut(&mut self, id: I) -> Result<&mut T, VerbsError> {
        let h: Handle = id.into();
        self.slots
            .get_mut(h.index())
            .filter(|s| s.generation == h.generation())
            .and_then(|s| s.value.as_mut())
            .ok_or(VerbsError::InvalidHandle(self.name))
    }

    /// Removes an object. The ID is invalid after this.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`] if the ID is invalid.
    pub(crate) fn remove(&mut self, id: I) -> Result<T, VerbsError> {
        let h: Handle = id.into();
        let value = self
            .slots
            .get_mut(h.index())
            .filter(|s| s.generation == h.generation())
            .and_then(|s| {
                let v = s.value.take()?;
                // We don't use generation 0, so that a zero handle is always invalid.
                s.generation = s.generation.wrapping_add(1).max(1);
                Some(v)
            })
            .ok_or(VerbsError::InvalidHandle(self.name))?;
        self.free.push_back(h.index() as u32);
        self.len -= 1;
        Ok(value)
    }

    /// Iterates over all objects with their IDs, ordered by slot.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (I, &T)> {
        self.slots.iter().enumerate().filter_map(|(i, s)| {
            let v = s.value.as_ref()?;
            Some((Handle::new(i as u32, s.generation).into(), v))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::PdId;

    #[test]
    fn stale_id_is_invalid() {
        let mut t: Table<PdId, u32> = Table::new("thing", 2);
        let a = t.insert(1).unwrap();
        assert_eq!(t.check_room(), Ok(()));
        let b = t.insert(2).unwrap();
        assert_eq!(
            t.check_room(),
            Err(VerbsError::InsufficientResources("thing"))
        );
        assert_eq!(t.insert(3), Err(VerbsError::InsufficientResources("thing")));
        assert_eq!(t.remove(a), Ok(1));
        let c = t.insert(3).unwrap();
        assert_ne!(a, c);
        assert_eq!(t.get(a), Err(VerbsError::InvalidHandle("thing")));
        assert_eq!(t.remove(a), Err(VerbsError::InvalidHandle("thing")));
        assert_eq!((t.get(b), t.get(c)), (Ok(&2), Ok(&3)));
        assert_eq!(
            t.iter().map(|(i, v)| (i, *v)).collect::<Vec<_>>(),
            [(c, 3), (b, 2)]
        );
        assert_eq!(t.len(), 2);
    }

    #[test]
    fn slots_are_reused_oldest_first() {
        let mut t: Table<PdId, u32> = Table::new("thing", 1000);
        let first = t.insert(0).unwrap();
        t.remove(first).unwrap();
        for n in 1..64 {
            let id = t.insert(n).unwrap();
            assert_ne!(Handle::from(id).index(), Handle::from(first).index());
            t.remove(id).unwrap();
        }
        let again = t.insert(99).unwrap();
        assert_eq!(Handle::from(again).index(), Handle::from(first).index());
        assert_eq!(t.get(first), Err(VerbsError::InvalidHandle("thing")));
    }
}
