//! A device between processes of one host: its packets go through shared memory.
//!
//! [`Shm::open`] opens a device at a local address; it is a [`Provider`](crate::verbs::Provider),
//! to be driven by the thread that owns it. It is the [`Nic`](crate::roce::nic::Nic) of the software
//! NIC, with its queue pairs, keys and connection manager, on another wire. So requests, rights,
//! fences, invalidation and errors are those of RDMA, and no byte of a process is mapped by another
//! one: the owner of memory executes each READ and WRITE of a peer after it has checked the key, and
//! what is shared are two rings of packets.
//!
//! | module | what it is |
//! | --- | --- |
//! | `hello` | the Unix socket by which two processes come to share memory, and who may |
//! | `descriptors` | sockets that take no descriptors from their peers |
//! | `closer` | closes sockets of those who may not, where the kernel has none of these |
//! | `ring` | packets in shared memory |
//! | `link` | the links of a device, and their lives |
//! | `provider` | [`Shm`] |
//!
//! # The way of a packet
//!
//! Headers and payload are copied into the ring, from where the peer copies the packet as a whole
//! before it parses it, and its payload to its destination: three copies of data from the disk's
//! buffer to the initiator's, and no system call. A peer that sleeps has announced it, and is woken
//! by a byte over the Unix socket. The end of that socket is the end of all connections of the link, at
//! once.
//!
//! # Security
//!
//! - User ids, as the kernel reports them, decide which processes may connect ([`ShmUsers`]).
//! - Both addresses of a link are of interfaces of this host ([`is_local`](crate::netif::is_local)),
//!   or it ends within a second.
//! - A peer can write anything into the rings at any time. Every value is read once, into private
//!   memory, and checked as bytes from a network are.
//! - Packets are attributed to the link that they came over, not to what they say, so no peer takes
//!   part in connections of another.
//! - A peer cannot make a device wait: packets that it does not read are dropped, and the kernel
//!   refuses descriptors, whose closing may take long. Those of the user of a listener are taken after
//!   that user was let in.
//! - Kernels before Linux 6.16 cannot refuse them ([`refuses_descriptors`]). There, no message of a user
//!   who is not let in is read, and their sockets are closed on another thread; while too many are being
//!   closed, no process is accepted. Users who are let in are trusted. And **any local user can keep a
//!   process that shares memory from ending**, even after SIGKILL.
//!
//! Packets have no ICRC (their field is zero), and a path MTU of 4096 bytes.
//!
//! Not implemented: memory that both processes map, which would save copies; a link that carries
//! connections of several workers.

mod closer;
mod descriptors;
mod hello;
mod link;
mod provider;
mod ring;

pub use closer::check_closed;
pub use descriptors::refuses_descriptors;
pub use hello::{ListeningProcess, ShmUsers};
pub use link::{GREETING, LinkCounters, MAX_GREETING, MAX_LINKS};
pub use provider::{PROVIDER, Shm, ShmConfig, ShmListener, ask_listener, listening_process};
