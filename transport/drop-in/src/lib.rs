//! libibverbs.so.1, librdmacm.so.1 and libibumad.so.3 over the software NIC: programs that were built
//! for rdma-core run without an adapter, a kernel module or privileges.
//!
//! One shared object answers to all names, so that the libraries have one device, one lock and one
//! thread. `riser run` makes the links and lets a program find them. The structures are
//! those of the public headers of rdma-core 44.0 ([`riser_rdma_core_sys::bindings`]), since programs
//! read their fields, and call through their tables of functions, without a call of the library.
//!
//! | module | what it has |
//! | --- | --- |
//! | `exports` | the symbols with their versions, from `symbols.txt` |
//! | `object` | what programs hold pointers to |
//! | `engine` | a NIC with its lock and its thread |
//! | `share` | an address that several processes have |
//! | `fork` | processes that begin as copies |
//! | `devices` | the list of devices |
//! | `context` | opened devices, their attributes and ports |
//! | `open` | opening devices; the tables of functions |
//! | `command` | command descriptors, by which devices are imported |
//! | `async_events` | asynchronous events as programs get them |
//! | `domain` | protection domains, parent domains and thread domains |
//! | `memory`, `dm` | memory regions, device memory |
//! | `cq`, `cq_ex` | completion queues and their channels, extended polling |
//! | `qp` | queue pairs and shared receive queues |
//! | `post`, `post_ex` | work requests, in structures and by `ibv_wr_*` calls |
//! | `builder` | batches of requests from `ibv_wr_*` calls |
//! | `address` | address handles |
//! | `neighbor` | Ethernet addresses of destinations |
//! | `cm` | librdmacm |
//! | `umad` | libibumad |
//! | `mad` | its datagrams |
//! | `administration` | what it asks subnet administration |
//! | `names` | names of values, rates |
//! | `lock` | locks after a panic |
//! | `kernel` | structures of the kernel's interface |
//! | `thread` | its threads |
//! | `cancel` | cancellation of the program's threads |
//! | `turn` | parts of objects that one thread uses at a time |
//!
//! # Pointers
//! Every exported function takes what its manual page says, and is unsafe for that reason. A pointer
//! to an object that no longer exists is refused with `EINVAL` all the same, until the memory belongs
//! to another object of the kind: see `object`.
//!
//! # Memory that goes away
//! A program may unmap memory that is still registered. An adapter goes on with the pages, which it
//! has pinned; this library has nothing but the program's own mapping. Each access is a copy, and
//! handlers for SIGSEGV and SIGBUS let a copy fail (`riser_memory::fault`). What a peer has written
//! there is lost, as what an adapter writes to such pages is for the program. Packets that were made
//! meanwhile are dropped and not sent. From then on the region's memory is looked at before each
//! access, as that of regions with `IBV_ACCESS_ON_DEMAND` always is: an access to what is gone fails
//! as one outside of the region does.
//!
//! Doing so for all regions from the start would cost a system call for each message. All signals that
//! are not of such a copy go to the action that the program had when it first registered memory. A
//! program that installs a handler for SIGSEGV later, and does not call the one that it has found
//! there, gets these faults itself. So do all on other processors than x86-64.
//!
//! # Progress
//! A call that polls a completion queue also drives the NIC. Where no call does, a thread takes
//! over: see `engine`.

#![allow(unsafe_code, reason = "this crate is a C interface")]

mod address;
mod administration;
mod async_events;
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
mod port_table;
mod post;
mod post_ex;
mod qp;
mod queue;
mod sges;
mod share;
mod thread;
mod turn;
mod umad;
mod window;
