//! Tests of connections: a rig for every protocol, and scripts that run with each of them.

mod functions;
mod limits;
mod order;
pub(crate) mod rig;
mod stream;
mod timeouts;
