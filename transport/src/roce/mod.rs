//! The software NIC: RoCEv2 over an ordinary UDP socket.
//!
//! [`Roce::open`] opens a device at a local address; it is a [`Provider`](crate::verbs::Provider),
//! to be driven by the thread that owns it. It needs no privilege. Two programs on one host use two
//! addresses, 127.0.0.1 and 127.0.0.2 say. The protocol itself is the [`nic::Nic`], which has no
//! socket and no clock; [`crate::loopback`] drives the same device over a wire in memory.
//!
//! ```no_run
//! use std::time::{Duration, Instant};
//! use riser_transport::roce::{Roce, RoceConfig};
//! use riser_transport::verbs::{CmEventKind, ConnParam, PortSpace, Provider, RdmaCm, Verbs};
//! # use riser_transport::verbs::QpInitAttr;
//! # fn connect(
//! #     init: impl FnOnce(&mut Roce) -> QpInitAttr,
//! # ) -> Result<(), Box<dyn std::error::Error>> {
//!
//! let mut nic = Roce::open(&RoceConfig::new("127.0.0.2".parse()?))?;
//! let id = nic.create_id(PortSpace::Tcp)?;
//! let wait = Duration::from_secs(2);
//! nic.resolve_addr(id, None, "127.0.0.1:5555".parse()?, wait)?;
//! nic.resolve_route(id, wait)?;
//! let init = init(&mut nic); // a protection domain, completion queues and the queues' depths
//! let qp = nic.create_cm_qp(id, &init)?;
//! nic.connect(id, &ConnParam::default())?;
//! loop {
//!     nic.progress(Instant::now());
//!     match nic.poll_cm_event().map(|e| e.kind) {
//!         Some(CmEventKind::Established { .. }) => break, // and post work to `qp`
//!         Some(CmEventKind::Rejected { reason, .. }) => panic!("refused: {reason}"),
//!         _ => {} // nothing yet: nic.arm_fds(), and sleep on nic.event_fds() until nic.deadline()
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! RoCEv2 is neither encrypted nor authenticated: a host that can send packets with a peer's
//! address can guess at its connections. Random queue pair numbers, PSNs and keys make guessing
//! hard; a network that keeps strangers out makes it impossible.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`cq`] | completion queues |
//! | [`srq`] | shared receive queues |
//! | [`ud`] | datagram queue pairs |
//! | [`nic`] | the device and its connection manager, without the socket |
//! | [`batch`], [`gather`] | packets on their way out |
//! | [`driver`] | the UDP socket |
//! | [`steer`] | which worker a datagram belongs to |
//! | [`fault`] | a bad wire, by a seed |
//! | [`pcap`] | captures |

pub mod batch;
pub mod cq;
pub(crate) mod delegate;
pub mod driver;
pub mod fault;
pub mod gather;
pub mod nic;
pub mod pcap;
mod provider;
pub mod srq;
pub mod steer;
mod sys;
pub mod ud;

pub use fault::RoceFaults;
pub use provider::{ForwardedPacket, Roce, RoceConfig};
