//! Implements libibverbs.so.1, librdmacm.so.1 and libibumad.so.3 using the software NIC, so that
//! programs built for rdma-core run without an adapter, a kernel module or privileges.
//!
//! A single shared object is used for all of these names, so that the libraries share one device,
//! one lock and one thread. `riser run` creates the links and configures a program to use them. The
//! structures are defined in the public headers of rdma-core 44.0
//! ([`riser_rdma_core_sys::bindings`]), and can't be changed, because programs directly access
//! their fields and function tables.
//!
//! | module | contents |
//! | --- | --- |
//! | `exports` | the symbols with their versions, from `symbols.txt` |
//! | `object` | objects that programs have pointers to |
//! | `engine` | a NIC with its lock and its thread |
//! | `driver` | the thread or call that drives a NIC |
//! | `broker` | an address shared by several processes |
//! | `fork` | forks of a process |
//! | `devices` | the list of devices |
//! | `context` | opened devices, their attributes and ports |
//! | `open` | opening devices, function tables |
//! | `command` | command descriptors, which are used to import devices |
//! | `async_events` | asynchronous events, as returned to programs |
//! | `domain` | protection domains, parent domains and thread domains |
//! | `memory`, `dm` | memory regions, device memory |
//! | `cq`, `cq_ex` | completion queues and their channels, extended polling |
//! | `qp` | queue pairs and shared receive queues |
//! | `post`, `post_ex` | work requests, from structures and from `ibv_wr_*` calls |
//! | `builder` | batches of requests from `ibv_wr_*` calls |
//! | `address` | address handles |
//! | `neighbor` | Ethernet addresses of destinations |
//! | `cm` | librdmacm |
//! | `umad` | libibumad |
//! | `mad` | management datagrams of libibumad |
//! | `administration` | subnet administration requests of libibumad |
//! | `names` | names of values, rates |
//! | `lock` | lock poisoning, lock order |
//! | `kernel` | structures of the kernel interface |
//! | `thread` | threads of this library |
//! | `cancel` | cancellation of the program's threads |
//! | `turn` | parts of objects that are used by one thread at a time |
//!
//! # Pointers
//! Every exported function has the preconditions documented in its manual page, and is therefore
//! unsafe. Nevertheless, pointers to destroyed objects are rejected with `EINVAL`, until the memory
//! is reused for another object of the same kind: see `object`.
//!
//! # Unmapped memory
//! A program may unmap memory that is still registered. An adapter continues to use the pages,
//! which it has pinned, but this library only has the program's own mapping. Each access is a copy,
//! and handlers for SIGSEGV and SIGBUS make the copy fail (`riser_memory::fault`). Data written
//! there by a peer is lost, just like data written to such pages by an adapter is not visible to
//! the program. Packets that were being generated are dropped instead of being sent. After that,
//! the region's memory is checked before each access, which is always done for regions with
//! `IBV_ACCESS_ON_DEMAND`: an access to unmapped memory fails in the same way as an access outside
//! of the region.
//!
//! Doing this for all regions from the start would cost a system call for each message. All signals
//! that are not caused by such a copy are passed to the action that the program had when it first
//! registered memory. If a program installs a handler for SIGSEGV later, and this handler does not
//! call the previous action, it has to handle these faults itself. This is always the case on other
//! processors than x86-64.
//!
//! # Progress
//! A call that polls a completion queue also drives the NIC. If no call does, a thread drives it:
//! see `engine`.

#![allow(unsafe_code, reason = "this crate is a C interface")]

mod address;
mod administration;
mod async_events;
mod broker;
mod builder;
mod cancel;
mod cm;
mod command;
mod context;
mod cq;
mod cq_ex;
mod devices;
mod dm;
mod domain;
mod driver;
mod engine;
mod errno;
mod exports;
mod fork;
mod kernel;
mod lock;
mod mad;
mod memory;
mod names;
mod neighbor;
mod object;
mod open;
mod post;
mod post_ex;
mod qp;
mod queue;
mod sges;
mod thread;
mod turn;
mod umad;
mod window;
