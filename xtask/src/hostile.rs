//! `cargo xtask hostile`: sends almost valid messages of every protocol to a busy daemon
//! (`tests/tests/adversary/hostile.rs`) and checks how this affects the latency of its other work.

use crate::harnesses::{release_test, run_whole};
use crate::packages::{ensure, needs};
use crate::{Failure, sh};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Number of messages that must be received, per protocol.
    #[arg(long, default_value_t = 1_000_000)]
    messages: u64,
    /// Number of messages to send per second, or 0 to send as fast as possible. Note that 0 will
    /// measure this machine's limits rather than the daemon's.
    #[arg(long, default_value_t = 5_000)]
    rate: u64,
    /// Seed for the message generator.
    #[arg(long, default_value_t = 0xadd)]
    seed: u64,
    /// Use only this protocol: srp, iscsi, iser, connectionmanagement, devicemanagement, roce or
    /// http.
    #[arg(long)]
    protocol: Option<String>,
}

/// Runs this test with the `release` profile and prints its results. Root is required to create
/// the networks. The test fails if the messages increase the 99th percentile of another session's
/// latency to more than twice the value seen when we send the same messages to another daemon on
/// this machine.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    ensure(needs("networks"));
    if !sh::is_root() {
        return Err("creating network namespaces requires root".into());
    }
    let mut command = release_test(&["--test", "adversary", "--"])?;
    command.args(["--ignored", "--nocapture"]);
    command.arg("almost_valid_messages_spare_other_sessions");
    command.env("RISER_HOSTILE_MESSAGES", options.messages.to_string());
    command.env("RISER_HOSTILE_RATE", options.rate.to_string());
    command.env("RISER_HOSTILE_IS_TIMED", "1");
    command.env("RISER_ADVERSARY_SEED", options.seed.to_string());
    if let Some(protocol) = &options.protocol {
        command.env("RISER_HOSTILE_PROTOCOL", protocol);
    }
    run_whole(&mut command)
}
