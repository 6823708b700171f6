//! libibverbs.so.1 and librdmacm.so.1 over the software NIC: RDMA programs that were built for
//! rdma-core run without an adapter, a kernel module or a privilege.
//!
//! One shared object answers to both names, so that both libraries have one device, one lock and
//! one thread. `riser run` makes the two links and lets a program find them. The structures are
//! those of the public headers of rdma-core 44.0 ([`riser_rdma_core_sys::bindings`]), since programs
//! read their fields, and call through their tables of functions, without a call of the library.
//!
//! | module | what it has |
//! | --- | --- |
//! | `exports` | the symbols with their versions, from `symbols.txt` |
//! | `object` | what programs hold pointers to |
//! | `engine` | a NIC with its lock and its thread |
//! | `devices` | the list of devices |
//! | `context` | opened devices, their attributes and ports |
//! | `open` | opening devices; the tables of functions |
//! | `async_events` | asynchronous events as programs get them |
//! | `memory` | protection domains and memory regions |
//! | `cq`, `cq_ex` | completion queues and their channels, extended polling |
//! | `qp` | queue pairs and shared receive queues |
//! | `post`, `post_ex` | work requests |
//! | `address` | address handles |
//! | `cm` | librdmacm |
//! | `names` | names of values, rates |
//! | `clock`, `turn` | the device's clock, parts of objects that one thread uses at a time |
//!
//! # Pointers
//! Every exported function takes what its manual page says, and is unsafe for that reason. A pointer
//! to an object that no longer exists is refused with `EINVAL` all the same, until the memory belongs
//! to another object of the kind: see `object`.
//!
//! # Progress
//! A call that polls a completion queue also drives the NIC. Where no call does, a thread takes
//! over: see `engine`.

#![allow(unsafe_code, reason = "this crate is a C interface")]

mod address;
mod async_events;
mod clock;
mod cm;
mod context;
mod cq;
mod cq_ex;
mod devices;
mod engine;
mod errno;
mod exports;
mod memory;
mod names;
mod object;
mod open;
mod post;
mod post_ex;
mod qp;
mod queue;
mod turn;
