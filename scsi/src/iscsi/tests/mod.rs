//! Tests of the wire formats, of negotiation, and of both logins against each other.

mod login;
mod wire;
