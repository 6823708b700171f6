//! RDMA verbs, connection management, and the providers that carry them.
//!
//! - [`cm`]: the InfiniBand communication manager as a pure machine.
//! - [`verbs`]: the types and the three traits that everything above is written against.
//! - [`wire`]: the RoCEv2 wire format: headers, opcode table, ICRC.
//! - [`mr`]: the memory-key table of our own devices.
//! - [`rc`]: the reliable-connection transport, as pure machines.
//! - [`rdmap`]: connections of iWARP.
//! - [`uc`]: the unreliable-connection transport, as a pure machine.
//! - [`rdma_core`]: libibverbs and librdmacm, loaded at run time.
//! - [`roce`]: the software NIC.
//! - [`iwarp`]: a device whose connections are those of iWARP, over TCP.
//! - [`shm`]: the same device between processes of one host, in shared memory.
//! - [`loopback`]: the same device over a deterministic wire in memory.
//! - [`mr_pool`]: recycles fast-registered regions.
//! - [`cq_pool`]: completion queues that several users share.
//! - [`umem`]: scatter lists as ranges of memory.
//! - [`netif`]: this host's network interfaces.
//! - [`table`]: objects named by generation-checked handles.
//! - [`host`]: what a host offers, for people.

pub mod cm;
pub mod cq_pool;
pub mod host;
pub mod iwarp;
pub mod loopback;
pub mod mr;
pub mod mr_pool;
pub mod netif;
pub mod rc;
pub mod rdma_core;
pub mod rdmap;
pub mod roce;
pub mod shm;
mod table;
pub mod uc;
pub mod umem;
pub mod verbs;
pub mod wire;
