//! The ports of the RDMA CM, in memory shared by all processes of an address.
//!
//! Each process holds a lock on the byte of this memory whose offset is its slot number. The kernel
//! releases it when the process exits.
//!
//! Ports of a killed process are freed by other processes when they find that there is no process
//! in its slot. At this time, a new process may already use this slot and may have allocated the
//! same port, for example if a server was restarted. So the owner of a port consists of the slot
//! and a number which distinguishes it from previous owners, and a port is only freed if it still
//! has the same owner.

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

/// Number of bits of a queue pair number that contain the slot.
pub(crate) const BITS: u8 = 5;

/// Number of slots. The first slot is never used by a process.
pub(crate) const SLOTS: u8 = 1 << BITS;

/// Port spaces in the table.
const SPACES: [RdmaPortSpace; 4] = [
    RdmaPortSpace::Tcp,
    RdmaPortSpace::Udp,
    RdmaPortSpace::IpoIb,
    RdmaPortSpace::Ib,
];
const PORTS: usize = SPACES.len() << 16;

/// Number of requests whose slots are recorded. If the requests of two peers use the same entry, a
/// message that cancels the older request is lost, and that request times out.
const REQUESTS: usize = 1 << 12;

/// Version of the contents of the shared memory, and of its locks. It is included in the length, so
/// that processes with a different version can detect it.
const VERSION: usize = 2;

/// Number of entries in the shared memory: owners of ports, slots of requests, and the number of
/// the next process for each slot.
const PLACES: usize = PORTS + REQUESTS + SLOTS as usize + VERSION;

/// Size of the shared memory in bytes.
const TABLE: usize = PLACES * size_of::<AtomicU16>();

/// A port of the RDMA CM.
pub(crate) type Port = (RdmaPortSpace, u16);

/// The owner of a port, and whether it is listening: the slot is in the lowest bits, the number of
/// the process in the highest bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner(u16);

impl Owner {
    /// No process.
    pub(crate) const FREE: Self = Self(0);

    const LISTENS: u16 = 1 << BITS;

    /// Creates the owner for the process in a slot. The number repeats after a thousand other
    /// processes.
    pub(crate) fn new(slot: u8, number: u16) -> Self {
        Self(number << (BITS + 1) | u16::from(slot))
    }

    /// Returns its slot, or 0 if the port is free.
    pub(crate) fn slot(self) -> u8 {
        (self.0 & (Self::LISTENS - 1)) as u8
    }

    /// Returns whether it receives requests for the port.
    pub(crate) fn listens(self) -> bool {
        self.0 & Self::LISTENS != 0
    }

    /// Returns the same process with the listening flag.
    pub(crate) fn listening(self) -> Self {
        Self(self.0 | Self::LISTENS)
    }

    /// Returns the same process without the listening flag.
    fn idle(self) -> Self {
        Self(self.0 & !Self::LISTENS)
    }
}

/// The owners of all ports, as seen and changed by one process.
pub(crate) struct PortTable {
    places: NonNull<AtomicU16>,
    memory: OwnedFd,
    /// The memory, opened separately by this process. It holds a lock while it is open.
    life: OwnedFd,
    own: Owner,
}

// SAFETY: it only contains atomics.
unsafe impl Send for PortTable {}
// SAFETY: as above.
unsafe impl Sync for PortTable {}

impl PortTable {
    const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

    /// Creates the memory. No process can change its length, because accesses by processes that
    /// have it mapped would fail.
    ///
    /// # Errors
    /// Returns errors of the system calls.
    pub(crate) fn make() -> io::Result<OwnedFd> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = memfd_create("riser-ports", flags)?;
        ftruncate(&memory, TABLE as u64)?;
        fcntl_add_seals(&memory, Self::SEALS)?;
        Ok(memory)
    }

    /// Maps the memory for a process that was assigned to a slot, and has no ports yet. Returns
    /// `None` if it was created by a different version of this library.
    ///
    /// # Errors
    /// Returns errors of the system calls.
    pub(crate) fn map(memory: OwnedFd, slot: u8) -> io::Result<Option<Self>> {
        let is_sealed = fcntl_get_seals(&memory).is_ok_and(|seals| seals.contains(Self::SEALS));
        if !is_sealed || fstat(&memory)?.st_size != TABLE as i64 {
            return Ok(None);
        }
        // A descriptor received from another process refers to the same open file, and so has the
        // same locks.
        let path = format!("/proc/thread-self/fd/{}", memory.as_raw_fd());
        let life = open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        let life = life.map_err(|error| match error {
            Os::NOENT => io::Error::new(io::ErrorKind::NotFound, "/proc is not mounted"),
            _ => error.into(),
        })?;
        let (rights, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: this is a new mapping, and the length of the memory can't change.
        let start = unsafe { mmap(ptr::null_mut(), TABLE, rights, flags, &memory, 0) }?;
        let places = NonNull::new(start.cast::<AtomicU16>()).ok_or(Os::NOMEM)?;
        let own = Owner::new(slot, 0);
        let mut table = Self {
            places,
            memory,
            life,
            own,
        };
        // This is a shared lock, because the previous process may not have exited completely.
        lock(&table.life, libc::F_OFD_SETLK, slot, libc::F_RDLCK)?;
        let number = &table.all()[PORTS + REQUESTS + usize::from(slot)];
        let number = number.fetch_add(1, Ordering::AcqRel);
        table.own = Owner::new(slot, number);
        // The previous process in this slot may have been killed.
        table.clear();
        Ok(Some(table))
    }

    /// Returns the memory, for other processes.
    pub(crate) fn memory(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// Returns the descriptor that indicates that this process exists.
    pub(crate) fn life(&self) -> BorrowedFd<'_> {
        self.life.as_fd()
    }

    /// Returns whether there is a process in a slot that uses this memory. It may have exited a
    /// moment ago.
    pub(crate) fn has_process(&self, slot: u8) -> bool {
        let held = lock(&self.memory, libc::F_OFD_GETLK, slot, libc::F_WRLCK);
        // If the lock can't be queried, we assume that there is a process.
        held.map_or(true, |kind| kind != libc::F_UNLCK)
    }

    /// Releases the slot and all ports.
    pub(crate) fn leave(&self) {
        self.clear();
        let slot = self.own.slot();
        if let Err(error) = lock(&self.life, libc::F_OFD_SETLK, slot, libc::F_UNLCK) {
            warn!(%error, slot, "cannot release a slot of a closed address");
        }
    }

    fn all(&self) -> &[AtomicU16] {
        // SAFETY: the mapping has this length, is page-aligned, and exists as long as the table.
        unsafe { std::slice::from_raw_parts(self.places.as_ptr(), PLACES) }
    }

    /// Returns the entry for the slot of a peer's request.
    fn request(&self, peer: IpAddr, id: CommId) -> &AtomicU16 {
        // IDs of a peer may be consecutive, and so may addresses.
        let mut hasher = DefaultHasher::new();
        (peer.to_canonical(), id).hash(&mut hasher);
        &self.all()[PORTS + hasher.finish() as usize % REQUESTS]
    }

    /// Returns the slot that a peer's request was sent to, or 0 if it is not known.
    pub(crate) fn slot_of_request(&self, peer: IpAddr, id: CommId) -> u8 {
        Owner(self.request(peer, id).load(Ordering::Relaxed)).slot()
    }

    /// Records the slot that a peer's request is sent to.
    pub(crate) fn note_request(&self, peer: IpAddr, id: CommId, slot: u8) {
        let place = self.request(peer, id);
        place.store(slot.into(), Ordering::Relaxed);
    }

    fn place(&self, (space, port): Port) -> &AtomicU16 {
        let space = SPACES.iter().position(|s| *s == space).unwrap_or(0);
        &self.all()[space << 16 | usize::from(port)]
    }

    /// Returns the owner of a port.
    pub(crate) fn owner(&self, port: Port) -> Owner {
        Owner(self.place(port).load(Ordering::Acquire))
    }

    /// Returns whether an owner is this process.
    pub(crate) fn is_own(&self, owner: Owner) -> bool {
        owner.idle() == self.own
    }

    /// Allocates a port for this process. Returns false if `from` is no longer its owner.
    pub(crate) fn claim_port(&self, port: Port, from: Owner) -> bool {
        self.replace(port, from, self.own)
    }

    /// Frees a port. Returns false if `from` is no longer its owner.
    pub(crate) fn free(&self, port: Port, from: Owner) -> bool {
        self.replace(port, from, Owner::FREE)
    }

    /// Records whether this process is listening on its port.
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
    pub(crate) fn release_port(&self, port: Port) {
        let owner = self.owner(port);
        if self.is_own(owner) {
            self.free(port, owner);
        }
    }

    /// Transfers a port from one owner to another. Returns false if `from` is no longer its owner.
    pub(crate) fn replace(&self, port: Port, from: Owner, to: Owner) -> bool {
        let place = self.place(port);
        place
            .compare_exchange(from.0, to.0, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    /// Frees all ports of this process's slot, and removes its requests.
    fn clear(&self) {
        for place in &self.all()[..PORTS + REQUESTS] {
            let value = place.load(Ordering::Relaxed);
            if Owner(value).slot() == self.own.slot() {
                let _ = place.compare_exchange(value, 0, Ordering::AcqRel, Ordering::Relaxed);
            }
        }
    }
}

/// Executes an `fcntl(2)` lock command for a slot's byte. Returns the type of the conflicting lock.
///
/// # Errors
/// Returns errors of `fcntl(2)`.
fn lock(memory: &OwnedFd, what: c_int, slot: u8, kind: c_int) -> io::Result<c_int> {
    // SAFETY: it only contains integers.
    let mut lock: libc::flock = unsafe { mem::zeroed() };
    lock.l_type = kind as c_short;
    lock.l_start = slot.into();
    lock.l_len = 1;
    // SAFETY: these commands require such a structure.
    match unsafe { libc::fcntl(memory.as_raw_fd(), what, &raw mut lock) } {
        0 => Ok(lock.l_type.into()),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Drop for PortTable {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this table and is not used anymore.
        let _ = unsafe { munmap(self.places.as_ptr().cast(), TABLE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PORT: Port = (RdmaPortSpace::Tcp, 7471);

    /// Returns the table of a process that was assigned to a slot.
    fn of_slot(memory: &OwnedFd, slot: u8) -> PortTable {
        let memory = memory.try_clone().unwrap();
        PortTable::map(memory, slot).unwrap().unwrap()
    }

    #[test]
    fn reused_port_is_not_freed() {
        let memory = PortTable::make().unwrap();
        let (first, killed) = (of_slot(&memory, 1), of_slot(&memory, 2));
        assert!(killed.claim_port(PORT, Owner::FREE));
        killed.set_listening(PORT, true);
        let seen = first.owner(PORT);
        assert_eq!(seen, killed.own.listening());
        // The server is restarted before its port is freed by the first process.
        let again = of_slot(&memory, 2);
        assert_eq!(first.owner(PORT), Owner::FREE);
        assert!(again.claim_port(PORT, Owner::FREE));
        again.set_listening(PORT, true);
        assert!(!first.free(PORT, seen));
        assert!(!first.claim_port(PORT, seen));
        let owner = first.owner(PORT);
        assert!(again.is_own(owner) && owner.listens());
        assert!(!killed.is_own(owner));
        // Actions of the previous process have no effect either.
        killed.set_listening(PORT, false);
        killed.release_port(PORT);
        assert_eq!(first.owner(PORT), owner);
        again.release_port(PORT);
        assert_eq!(first.owner(PORT), Owner::FREE);
    }

    #[test]
    fn slot_is_used_until_last_process_exits() {
        let memory = PortTable::make().unwrap();
        let (first, killed) = (of_slot(&memory, 1), of_slot(&memory, 2));
        let slots = |table: &PortTable| {
            (0..SLOTS)
                .filter(|s| table.has_process(*s))
                .collect::<Vec<_>>()
        };
        assert_eq!(slots(&first), [1, 2]);
        assert_eq!(slots(&killed), [1, 2]);
        // A new process can use the slot before the previous process has closed everything.
        let again = of_slot(&memory, 2);
        drop(killed);
        assert_eq!(slots(&first), [1, 2]);
        again.leave();
        assert_eq!(slots(&first), [1]);
        drop(first);
        assert!(slots(&again).is_empty());
    }

    #[test]
    fn table_length_is_sealed() {
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
