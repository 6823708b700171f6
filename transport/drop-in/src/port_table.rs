//! The ports of the RDMA CM, in memory that all processes of an address share.
//!
//! Each process has a lock on the byte of the memory that its slot counts, which the kernel takes back.
//!
//! A process that was killed leaves its ports, which others free when they find its slot without a
//! process. Another may have come to the slot by then, and have taken the same port: a server that is
//! started again does just that. So the owner of a port has a number beside its slot, by which it
//! differs from those before, and a port is freed only where it is still that owner's.

use std::ffi::{c_int, c_short};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io;
use std::mem;
use std::net::IpAddr;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU16, Ordering};

use riser_transport::wire::cm_msg::CommId;
use riser_transport::wire::cma::RdmaPortSpace;
use rustix::fs::{
    MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate,
    memfd_create, open,
};
use rustix::io::Errno as Os;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use tracing::warn;

/// Bits of a queue pair number that have the slot.
pub(crate) const BITS: u8 = 5;

/// Slots. The first one belongs to no process.
pub(crate) const SLOTS: u8 = 1 << BITS;

/// Spaces of ports in the table.
const SPACES: [RdmaPortSpace; 4] = [
    RdmaPortSpace::Tcp,
    RdmaPortSpace::Udp,
    RdmaPortSpace::IpoIb,
    RdmaPortSpace::Ib,
];
const PORTS: usize = SPACES.len() << 16;

/// Requests whose slots are remembered. Those of two peers may have one place: then a message by which
/// the older is taken back goes astray, and that request ends by its time-out.
const REQUESTS: usize = 1 << 12;

/// Version of what the shared memory says, and of its locks. Its length shows it to processes with
/// another one.
const VERSION: usize = 2;

/// Places of the shared memory: owners of ports, slots of requests, and for each slot the number of
/// its next process.
const PLACES: usize = PORTS + REQUESTS + SLOTS as usize + VERSION;

/// Bytes of the shared memory.
const TABLE: usize = PLACES * size_of::<AtomicU16>();

/// A port of the RDMA CM.
pub(crate) type Port = (RdmaPortSpace, u16);

/// Who has a port, and whether it listens: the slot in the lowest bits, and the process's number in the
/// highest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner(u16);

impl Owner {
    /// No process.
    pub(crate) const FREE: Self = Self(0);

    const LISTENS: u16 = 1 << BITS;

    /// The process of a slot. After a thousand others it has the same number again.
    pub(crate) fn new(slot: u8, number: u16) -> Self {
        Self(number << (BITS + 1) | u16::from(slot))
    }

    /// Its slot, 0 where the port is free.
    pub(crate) fn slot(self) -> u8 {
        (self.0 & (Self::LISTENS - 1)) as u8
    }

    /// Whether requests for the port go to it.
    pub(crate) fn listens(self) -> bool {
        self.0 & Self::LISTENS != 0
    }

    /// The same process, where it listens.
    pub(crate) fn listening(self) -> Self {
        Self(self.0 | Self::LISTENS)
    }

    /// The same process, where it does not listen.
    fn idle(self) -> Self {
        Self(self.0 & !Self::LISTENS)
    }
}

/// The owner of each port, as one process sees and changes it.
pub(crate) struct PortTable {
    places: NonNull<AtomicU16>,
    memory: OwnedFd,
    /// The memory, opened by this process alone: with a lock, which lasts as long as it is open.
    life: OwnedFd,
    own: Owner,
}

// SAFETY: it has atomics only.
unsafe impl Send for PortTable {}
// SAFETY: as above.
unsafe impl Sync for PortTable {}

impl PortTable {
    const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

    /// Makes the memory, whose length no process can change: those that have it mapped would end.
    ///
    /// # Errors
    /// Those of the system calls.
    pub(crate) fn make() -> io::Result<OwnedFd> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = memfd_create("riser-ports", flags)?;
        ftruncate(&memory, TABLE as u64)?;
        fcntl_add_seals(&memory, Self::SEALS)?;
        Ok(memory)
    }

    /// Maps the memory for the process that has come to a slot, and has no port yet. `None` where it is
    /// that of another version of this library.
    ///
    /// # Errors
    /// Those of the system calls.
    pub(crate) fn map(memory: OwnedFd, slot: u8) -> io::Result<Option<Self>> {
        let is_sealed = fcntl_get_seals(&memory).is_ok_and(|seals| seals.contains(Self::SEALS));
        if !is_sealed || fstat(&memory)?.st_size != TABLE as i64 {
            return Ok(None);
        }
        // The descriptor that comes from another process is the same open file, and so has the same locks.
        let path = format!("/proc/thread-self/fd/{}", memory.as_raw_fd());
        let life = open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        let life = life.map_err(|error| match error {
            Os::NOENT => io::Error::new(io::ErrorKind::NotFound, "/proc is not mounted"),
            _ => error.into(),
        })?;
        let (rights, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping; the memory has this length for ever.
        let start = unsafe { mmap(ptr::null_mut(), TABLE, rights, flags, &memory, 0) }?;
        let places = NonNull::new(start.cast::<AtomicU16>()).ok_or(Os::NOMEM)?;
        let own = Owner::new(slot, 0);
        let mut table = Self {
            places,
            memory,
            life,
            own,
        };
        // One that others may have as well: the process before may not have ended altogether.
        lock(&table.life, libc::F_OFD_SETLK, slot, libc::F_RDLCK)?;
        let number = &table.all()[PORTS + REQUESTS + usize::from(slot)];
        let number = number.fetch_add(1, Ordering::AcqRel);
        table.own = Owner::new(slot, number);
        // The process that had the slot before may have been killed.
        table.clear();
        Ok(Some(table))
    }

    /// The memory, for other processes.
    pub(crate) fn memory(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// The descriptor that says that this process is there.
    pub(crate) fn life(&self) -> BorrowedFd<'_> {
        self.life.as_fd()
    }

    /// Whether a slot has a process that has this memory. It may be a moment ago that it has ended.
    pub(crate) fn has_process(&self, slot: u8) -> bool {
        let held = lock(&self.memory, libc::F_OFD_GETLK, slot, libc::F_WRLCK);
        // One that cannot be asked for may be there.
        held.map_or(true, |kind| kind != libc::F_UNLCK)
    }

    /// Gives up the slot, and all ports.
    pub(crate) fn leave(&self) {
        self.clear();
        let slot = self.own.slot();
        if let Err(error) = lock(&self.life, libc::F_OFD_SETLK, slot, libc::F_UNLCK) {
            warn!(%error, slot, "a slot of an address that is gone stays taken");
        }
    }

    fn all(&self) -> &[AtomicU16] {
        // SAFETY: the mapping has this length, is aligned to a page, and lives as long as the table.
        unsafe { std::slice::from_raw_parts(self.places.as_ptr(), PLACES) }
    }

    /// The place for the slot of a peer's request.
    fn request(&self, peer: IpAddr, id: CommId) -> &AtomicU16 {
        // Ids of one peer may follow each other, and so may addresses.
        let mut hasher = DefaultHasher::new();
        (peer.to_canonical(), id).hash(&mut hasher);
        &self.all()[PORTS + hasher.finish() as usize % REQUESTS]
    }

    /// The slot that a peer's request went to, 0 where none is known.
    pub(crate) fn slot_of_request(&self, peer: IpAddr, id: CommId) -> u8 {
        Owner(self.request(peer, id).load(Ordering::Relaxed)).slot()
    }

    /// Notes the slot that a peer's request goes to.
    pub(crate) fn note_request(&self, peer: IpAddr, id: CommId, slot: u8) {
        let place = self.request(peer, id);
        place.store(slot.into(), Ordering::Relaxed);
    }

    fn place(&self, (space, port): Port) -> &AtomicU16 {
        let space = SPACES.iter().position(|s| *s == space).unwrap_or(0);
        &self.all()[space << 16 | usize::from(port)]
    }

    /// The process that has a port.
    pub(crate) fn owner(&self, port: Port) -> Owner {
        Owner(self.place(port).load(Ordering::Acquire))
    }

    /// Whether an owner is this process.
    pub(crate) fn is_own(&self, owner: Owner) -> bool {
        owner.idle() == self.own
    }

    /// Takes a port for this process; false where it is not `from`'s any longer.
    pub(crate) fn take(&self, port: Port, from: Owner) -> bool {
        self.replace(port, from, self.own)
    }

    /// Frees a port; false where it is not `from`'s any longer.
    pub(crate) fn free(&self, port: Port, from: Owner) -> bool {
        self.replace(port, from, Owner::FREE)
    }

    /// Notes whether this process listens at its port.
    pub(crate) fn set_listening(&self, port: Port, listens: bool) {
        let (without, with) = (self.own, self.own.listening());
        let (from, to) = if listens {
            (without, with)
        } else {
            (with, without)
        };
        self.replace(port, from, to);
    }

    /// Frees a port of this process.
    pub(crate) fn give_back(&self, port: Port) {
        let owner = self.owner(port);
        if self.is_own(owner) {
            self.free(port, owner);
        }
    }

    /// Gives a port of `from` to `to`; false where it is not `from`'s any longer.
    pub(crate) fn replace(&self, port: Port, from: Owner, to: Owner) -> bool {
        let place = self.place(port);
        place
            .compare_exchange(from.0, to.0, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    /// Frees all ports of this process's slot, and forgets its requests.
    fn clear(&self) {
        for place in &self.all()[..PORTS + REQUESTS] {
            let value = place.load(Ordering::Relaxed);
            if Owner(value).slot() == self.own.slot() {
                let _ = place.compare_exchange(value, 0, Ordering::AcqRel, Ordering::Relaxed);
            }
        }
    }
}

/// Has `fcntl(2)` do something about the lock on a slot's byte, of a kind or to one; answers the kind that
/// is there in its way.
///
/// # Errors
/// Those of `fcntl(2)`.
fn lock(memory: &OwnedFd, what: c_int, slot: u8, kind: c_int) -> io::Result<c_int> {
    // SAFETY: it has integers only.
    let mut lock: libc::flock = unsafe { mem::zeroed() };
    lock.l_type = kind as c_short;
    lock.l_start = slot.into();
    lock.l_len = 1;
    // SAFETY: these commands take such a structure.
    match unsafe { libc::fcntl(memory.as_raw_fd(), what, &raw mut lock) } {
        0 => Ok(lock.l_type.into()),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Drop for PortTable {
    fn drop(&mut self) {
        // SAFETY: the mapping is this table's, and nothing refers to it any longer.
        let _ = unsafe { munmap(self.places.as_ptr().cast(), TABLE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PORT: Port = (RdmaPortSpace::Tcp, 7471);

    /// The table of a process that comes to a slot.
    fn of_slot(memory: &OwnedFd, slot: u8) -> PortTable {
        let memory = memory.try_clone().unwrap();
        PortTable::map(memory, slot).unwrap().unwrap()
    }

    #[test]
    fn a_port_that_a_later_process_has_is_not_freed_for_an_earlier_one() {
        let memory = PortTable::make().unwrap();
        let (first, killed) = (of_slot(&memory, 1), of_slot(&memory, 2));
        assert!(killed.take(PORT, Owner::FREE));
        killed.set_listening(PORT, true);
        let seen = first.owner(PORT);
        assert_eq!(seen, killed.own.listening());
        // Before the first frees it, the server is back.
        let again = of_slot(&memory, 2);
        assert_eq!(first.owner(PORT), Owner::FREE);
        assert!(again.take(PORT, Owner::FREE));
        again.set_listening(PORT, true);
        assert!(!first.free(PORT, seen));
        assert!(!first.take(PORT, seen));
        let owner = first.owner(PORT);
        assert!(again.is_own(owner) && owner.listens());
        assert!(!killed.is_own(owner));
        // What the earlier one would still do changes nothing, either.
        killed.set_listening(PORT, false);
        killed.give_back(PORT);
        assert_eq!(first.owner(PORT), owner);
        again.give_back(PORT);
        assert_eq!(first.owner(PORT), Owner::FREE);
    }

    #[test]
    fn a_slot_has_a_process_as_long_as_one_of_it_lives() {
        let memory = PortTable::make().unwrap();
        let (first, killed) = (of_slot(&memory, 1), of_slot(&memory, 2));
        let slots = |table: &PortTable| {
            (0..SLOTS)
                .filter(|s| table.has_process(*s))
                .collect::<Vec<_>>()
        };
        assert_eq!(slots(&first), [1, 2]);
        assert_eq!(slots(&killed), [1, 2]);
        // One that comes to the slot before the one that ends has closed everything.
        let again = of_slot(&memory, 2);
        drop(killed);
        assert_eq!(slots(&first), [1, 2]);
        again.leave();
        assert_eq!(slots(&first), [1]);
        drop(first);
        assert!(slots(&again).is_empty());
    }

    #[test]
    fn no_process_changes_the_length_of_the_table() {
        let memory = PortTable::make().unwrap();
        for length in [TABLE - 1, 0, 2 * TABLE] {
            assert_eq!(ftruncate(&memory, length as u64), Err(Os::PERM));
        }
        let other = memfd_create("other", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&other, TABLE as u64 - 1).unwrap();
        let is_map = |memory: &OwnedFd| {
            let memory = memory.try_clone().unwrap();
            PortTable::map(memory, 1).unwrap().is_some()
        };
        fcntl_add_seals(&other, PortTable::SEALS).unwrap();
        assert!(is_map(&memory) && !is_map(&other));
        let unsealed = memfd_create("unsealed", MemfdFlags::empty()).unwrap();
        ftruncate(&unsealed, TABLE as u64).unwrap();
        assert!(!is_map(&unsealed));
    }
}
