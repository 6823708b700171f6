//! The software NIC: RoCEv2 over a standard UDP socket.
//!
//! [`Roce::open`] opens a device using a local address. The device implements
//! [`Provider`](crate::verbs::Provider) and must be driven by the thread that owns it. No
//! privileges are required. Two programs on the same host need to use different addresses, e.g.
//! 127.0.0.1 and 127.0.0.2. The protocol is implemented in [`Nic`](crate::nic::Nic), which doesn't
//! use a socket or a clock.
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
//! let init = init(&mut nic); // protection domain, completion queues and queue depths
//! let qp = nic.create_cm_qp(id, &init)?;
//! nic.connect(id, &ConnParam::default())?;
//! loop {
//!     nic.progress(Instant::now());
//!     match nic.poll_cm_event().map(|e| e.kind) {
//!         Some(CmEventKind::Established { .. }) => break, // start posting work to `qp`
//!         Some(CmEventKind::Rejected { reason, .. }) => panic!("refused: {reason}"),
//!         _ => {} // call nic.arm_fds() and wait on nic.event_fds() until nic.deadline()
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! RoCEv2 does not provide encryption or authentication: a host that can send packets with a
//! spoofed source address can attack connections of this peer by guessing. Random queue pair
//! numbers, PSNs and keys make this hard, but only a network without untrusted hosts can prevent
//! it.
//!
//! | module | description |
//! | --- | --- |
//! | [`driver`] | the UDP socket |
//! | [`gather`] | ICRC of payload in place |
//! | [`steer`] | selects the worker for a datagram |
//! | [`fault`] | fault injection based on a seed |
//! | [`pcap`] | packet captures |

pub mod driver;
pub mod fault;
pub mod gather;
pub mod pcap;
mod provider;
pub mod steer;
mod sys;

pub use fault::RoceFaults;
pub use provider::{ForwardedPacket, Roce, RoceConfig};
