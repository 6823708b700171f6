//! Linked lists of tasks. The links are stored in the tasks, so we don't need to allocate, and a
//! task can be removed from any position in constant time.

/// Used as an index if there is no task.
pub(super) const NIL: u32 = u32::MAX;

/// The previous and next tasks in a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Neighbours {
    pub(super) prev: u32,
    pub(super) next: u32,
}

impl Default for Neighbours {
    fn default() -> Self {
        Self {
            prev: NIL,
            next: NIL,
        }
    }
}

impl Neighbours {
    pub(super) fn prev(self) -> Option<u32> {
        (self.prev != NIL).then_some(self.prev)
    }

    pub(super) fn next(self) -> Option<u32> {
        (self.next != NIL).then_some(self.next)
    }
}

/// A type that can be stored in multiple lists.
pub(super) trait Linked {
    /// Returns the link with this number.
    fn link_mut(&mut self, link: usize) -> &mut Neighbours;
}

/// A linked list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct List {
    head: u32,
    tail: u32,
}

impl Default for List {
    fn default() -> Self {
        Self {
            head: NIL,
            tail: NIL,
        }
    }
}

impl List {
    pub(super) fn first(self) -> Option<u32> {
        (self.head != NIL).then_some(self.head)
    }

    pub(super) fn last(self) -> Option<u32> {
        (self.tail != NIL).then_some(self.tail)
    }

    /// Appends a task to this list, using the given link.
    pub(super) fn push<T: Linked>(&mut self, tasks: &mut [Option<T>], link: usize, slot: u32) {
        *link_of(tasks, link, slot) = Neighbours {
            prev: self.tail,
            next: NIL,
        };
        if self.tail == NIL {
            self.head = slot;
        } else {
            link_of(tasks, link, self.tail).next = slot;
        }
        self.tail = slot;
    }

    /// Removes a task from this list, using the given link.
    pub(super) fn remove<T: Linked>(&mut self, tasks: &mut [Option<T>], link: usize, slot: u32) {
        let Neighbours { prev, next } = std::mem::take(link_of(tasks, link, slot));
        if prev == NIL {
            self.head = next;
        } else {
            link_of(tasks, link, prev).next = next;
        }
        if next == NIL {
            self.tail = prev;
        } else {
            link_of(tasks, link, next).prev = prev;
        }
    }
}

fn link_of<T: Linked>(tasks: &mut [Option<T>], link: usize, slot: u32) -> &mut Neighbours {
    let task = tasks[slot as usize].as_mut();
    task.expect("listed task is in the set").link_mut(link)
}
