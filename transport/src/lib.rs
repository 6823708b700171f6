//! RDMA verbs, connection management, and their providers.
//!
//! - [`cm`]: InfiniBand communication manager as a pure state machine.
//! - [`verbs`]: types and the three traits used by all other code.
//! - [`wire`]: RoCEv2 wire format: headers, opcode table, ICRC.
//! - [`mr`]: memory key table for our own devices.
//! - [`rc`]: reliable connection transport, as pure state machines.
//! - [`rdmap`]: iWARP connections.
//! - [`uc`]: unreliable connection transport, as a pure state machine.
//! - [`rdma_core`]: libibverbs and librdmacm, loaded at runtime.
//! - [`nic`]: software NIC, without a wire.
//! - [`roce`]: software NIC using a UDP socket.
//! - [`iwarp`]: device for iWARP connections over TCP.
//! - [`shm`]: software NIC for processes on one host, using shared memory.
//! - [`loopback`]: software NIC using a deterministic in-memory wire.
//! - [`mr_pool`]: pool of fast-registration regions or integrity regions.
//! - [`rdma_rw`]: RDMA READs and WRITEs with protection information.
//! - [`umem`]: scatter lists as memory ranges.
//! - [`netif`]: network interfaces of this host.
//! - [`table`]: objects identified by generation-checked handles.
//! - [`host`]: report of the RDMA support on a host.

pub mod cm;
mod forward;
pub mod host;
pub mod iwarp;
pub mod loopback;
pub mod mr;
pub mod mr_pool;
pub mod netif;
pub mod nic;
pub mod rc;
pub mod rdma_core;
pub mod rdma_rw;
pub mod rdmap;
pub mod roce;
pub mod shm;
mod table;
pub mod uc;
pub mod umem;
pub mod verbs;
pub mod wire;
