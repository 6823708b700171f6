//! The software NIC: RoCEv2 over an ordinary UDP socket.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`table`] | objects named by generation-checked handles |
//! | [`cq`] | completion queues |
//! | [`mr`] | the memory-key table |
//! | [`qp_attr`] | the queue-pair state table |
//! | [`batch`] | packets on their way out |
//! | [`driver`] | the UDP socket |
//! | [`steer`] | which worker a datagram belongs to |
//! | [`fault`] | a bad wire, by a seed |
//! | [`pcap`] | captures |

pub mod batch;
pub mod cq;
pub mod driver;
pub mod fault;
pub mod mr;
pub mod pcap;
pub mod qp_attr;
pub mod steer;
pub mod table;
