//! `cargo xtask hostile`: messages that are almost right, of every protocol, to a daemon that has
//! other work (`tests/tests/adversary/hostile.rs`), and what they do to the times of that.

use crate::packages::{Need, ensure, need};
use crate::{Failure, crash, sh};

const NEEDS: &[Need] = &[need("ip", "iproute2", "network namespaces")];

/// Options of `cargo xtask hostile`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Messages of each protocol that have to arrive.
    #[arg(long, default_value_t = 1_000_000)]
    messages: u64,
    /// How many are sent a second; 0 for as many as can be, which shows what the machine can do
    /// rather than what the daemon does.
    #[arg(long, default_value_t = 5_000)]
    rate: u64,
    /// Seed of what is sent.
    #[arg(long, default_value_t = 0xadd)]
    seed: u64,
    /// Only this one: srp, iscsi, iser, connectionmanagement, devicemanagement, roce or http.
    #[arg(long)]
    protocol: Option<String>,
}

/// Runs the one test as root, who may make networks, in the programs' profile; it prints its figures,
/// and fails if they show that the messages make the 99th percentile of another session more than
/// twice as long as the same messages to another daemon on this machine do.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    ensure(NEEDS);
    if !sh::is_root() {
        return Err("only root may make network namespaces".into());
    }
    let mut command = crash::optimized_test("adversary")?;
    command.args(["--ignored", "--nocapture"]);
    command.arg("messages_that_are_almost_right_harm_no_other_session");
    command.env("RISER_HOSTILE_MESSAGES", options.messages.to_string());
    command.env("RISER_HOSTILE_RATE", options.rate.to_string());
    command.env("RISER_HOSTILE_IS_TIMED", "1");
    command.env("RISER_ADVERSARY_SEED", options.seed.to_string());
    if let Some(protocol) = &options.protocol {
        command.env("RISER_HOSTILE_PROTOCOL", protocol);
    }
    crash::run_whole(&mut command)
}
