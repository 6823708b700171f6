//! Tests for the wire formats, the negotiation, and the login of an initiator with a target.

mod login;
mod wire;
