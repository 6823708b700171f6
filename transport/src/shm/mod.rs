//! A device for processes on the same host, which uses shared memory to send packets.
//!
//! [`Shm::open`] opens a device using a local address. The device implements
//! [`Provider`](crate::verbs::Provider) and must be driven by the thread that owns it. It uses the
//! [`Nic`](crate::nic::Nic) of the software NIC with its queue pairs, keys and connection
//! manager, but a different wire. As a result, requests, access rights, fences, invalidation and
//! errors work like RDMA, and the memory of a process is never mapped by another process: each READ
//! or WRITE is executed by the owner of the memory, after checking the key. Only two packet rings
//! are shared.
//!
//! | module | description |
//! | --- | --- |
//! | `hello` | the Unix socket used to set up shared memory, and access control |
//! | `descriptors` | sockets that don't accept descriptors from their peers |
//! | `closer` | closes sockets of untrusted users if not supported by the kernel |
//! | `ring` | packets in shared memory |
//! | `link` | the links of a device and their states |
//! | `provider` | [`Shm`] |
//!
//! # Sending a packet
//!
//! Headers and payload are copied into the ring. The peer copies the entire packet out of the ring
//! before parsing it, and then copies the payload to its destination. This means that data is
//! copied three times between the buffer of the disk and the buffer of the initiator, but we don't
//! need any system calls. If a peer is about to sleep, it sets a flag, and we wake it up by sending
//! a byte on the Unix socket. When this socket is closed, all connections of the link are closed
//! immediately.
//!
//! # Security
//!
//! - Only processes with specific user ids can connect ([`ShmUsers`]). The user id is provided by
//!   the kernel.
//! - Both addresses of a link must be local addresses of this host
//!   ([`is_local`](crate::netif::is_local)). Otherwise, it is closed within a second.
//! - A peer can write anything to the rings at any time. We read each value once, copying it to
//!   private memory, and verify it like data from a network.
//! - The source of a packet depends on the link it is received on, not on its contents, so a peer
//!   can't use the connections of another peer.
//! - A peer can't block a device: if it doesn't read packets, they are dropped. Descriptors, which
//!   could block when they are closed, are rejected by the kernel, except from the user of a
//!   listener after checking their user id.
//! - Before Linux 6.16, the kernel cannot reject descriptors ([`refuses_descriptors`]). In this
//!   case, we never read messages from untrusted users, and close their sockets on a separate
//!   thread. If there are too many of them, no more connections are accepted. Allowed users are
//!   trusted. However, **any local user can prevent a process with shared memory from exiting**,
//!   even after SIGKILL.
//!
//! Packets don't have an ICRC (the field is zero), and the path MTU is 4096 bytes.
//!
//! Not implemented: memory mapped by both processes, which would avoid copies; sharing a link
//! between multiple workers.

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
pub use provider::{PROVIDER, Shm, ShmConfig, ShmListener, listening_process, query_listener};
