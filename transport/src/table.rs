//! A table of objects named by generation-checked handles.
//!
//! A slot that is vacated takes a new generation, so a handle kept beyond its object's life names
//! nothing. Vacated slots are used again in the order in which they were vacated, which keeps the
//! time between two uses of one slot as long as the slots that there are allow.
//!
//! Bound: the limit given at creation.

use std::collections::VecDeque;
use std::marker::PhantomData;

use crate::verbs::{Handle, VerbsError};

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

/// Objects of type `T` named by ids of type `I`.
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
    /// An empty table for at most `limit` objects; `name` is what errors call them.
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

    /// Number of objects in the table.
    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether another object would be refused.
    pub(crate) fn is_full(&self) -> bool {
        self.len >= self.limit
    }

    /// Checks for room before the caller makes what the object stands for, which it would otherwise
    /// have to undo.
    ///
    /// # Errors
    /// [`VerbsError::InsufficientResources`] at the limit.
    pub(crate) fn check_room(&self) -> Result<(), VerbsError> {
        if self.is_full() {
            return Err(VerbsError::InsufficientResources(self.name));
        }
        Ok(())
    }

    /// Inserts an object and returns its id.
    ///
    /// # Errors
    /// [`VerbsError::InsufficientResources`] at the limit.
    pub(crate) fn insert(&mut self, value: T) -> Result<I, VerbsError> {
        self.check_room()?;
        self.len += 1;
        // The first 64 slots are made before one is used again, so that handles age in small
        // tables as well. Beyond that a vacated slot comes first, which keeps the table small.
        if (self.slots.len() as u32) < self.limit.min(64) || self.free.is_empty() {
            let index = self.slots.len() as u32;
            self.slots.push(Slot {
                generation: 1,
                value: Some(value),
            });
            return Ok(Handle::new(index, 1).into());
        }
        let index = self.free.pop_front().expect("just seen to hold one");
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

    /// The object of an id.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`] if the id names none.
    pub(crate) fn get(&self, id: I) -> Result<&T, VerbsError> {
        self.slot(id)
            .and_then(|s| s.value.as_ref())
            .ok_or(VerbsError::InvalidHandle(self.name))
    }

    /// The object of an id, mutable.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`] if the id names none.
    pub(crate) fn get_mut(&mut self, id: I) -> Result<&mut T, VerbsError> {
        let h: Handle = id.into();
        self.slots
            .get_mut(h.index())
            .filter(|s| s.generation == h.generation())
            .and_then(|s| s.value.as_mut())
            .ok_or(VerbsError::InvalidHandle(self.name))
    }

    /// Removes an object; its id is stale from now on.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`] if the id names none.
    pub(crate) fn remove(&mut self, id: I) -> Result<T, VerbsError> {
        let h: Handle = id.into();
        let value = self
            .slots
            .get_mut(h.index())
            .filter(|s| s.generation == h.generation())
            .and_then(|s| {
                let v = s.value.take()?;
                // A generation of 0 is left out: a handle of zeros names nothing.
                s.generation = s.generation.wrapping_add(1).max(1);
                Some(v)
            })
            .ok_or(VerbsError::InvalidHandle(self.name))?;
        self.free.push_back(h.index() as u32);
        self.len -= 1;
        Ok(value)
    }

    /// All objects with their ids, in the order of their slots.
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
    fn a_stale_id_names_nothing() {
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
    fn slots_are_used_again_as_late_as_possible() {
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
