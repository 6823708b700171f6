//! Subnet administration (IBTA chapter 15): queries for paths, services and multicast groups.
//!
//! | module | contents |
//! | --- | --- |
//! | [`wire`] | MADs and their records |
//! | [`rmpp`] | responses that span several MADs |
//! | [`client`] | client side |
//! | [`administrator`] | server side, for RoCE fabrics, which have no subnet manager |
//! | [`resolver`] | addresses and names of the local host, for local programs and the kernel |

pub mod administrator;
pub mod client;
pub mod resolver;
pub mod rmpp;
pub mod wire;
