//! Subnet administration (IBTA chapter 15): what a fabric knows of its paths, services and groups.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`wire`] | the MADs and their records |
//! | [`rmpp`] | answers of several MADs |
//! | [`client`] | the end that asks |
//! | [`administrator`] | the end that answers, for fabrics of RoCE, which have none |
//! | [`resolver`] | addresses and names of this host, for those who ask it |

pub mod administrator;
pub mod client;
pub mod resolver;
pub mod rmpp;
pub mod wire;
