//! RDMA verbs, connection management, and the providers that carry them.
//!
//! - [`verbs`]: the types and the three traits that everything above is written against.

pub mod verbs;
