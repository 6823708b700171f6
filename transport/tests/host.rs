//! Tests with interfaces of a host, in a separate network namespace.

#![allow(unsafe_code, reason = "a thread enters a network namespace")]

use std::net::IpAddr;
use std::process::Command;

use riser_transport::netif::interfaces;
use rustix::thread::{UnshareFlags, unshare_unsafe};

/// Returns the interface of an address, in a namespace that was configured with these commands of
/// `ip`.
fn interface_of(address: &str, commands: &[&str]) -> Result<Option<String>, String> {
    // SAFETY: no descriptors are unshared, only the network of this thread.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.map_err(|error| error.to_string())?;
    for command in commands {
        let status = Command::new("ip").args(command.split(' ')).status();
        let status = status.map_err(|error| format!("ip: {error}"))?;
        assert!(status.success(), "ip {command}");
    }
    let address: IpAddr = address.parse().unwrap();
    let mut all = interfaces().unwrap().into_iter();
    Ok(all.find(|it| it.address == address).map(|it| it.name))
}

/// `keepalived` and `ifupdown` label the addresses that they add.
#[test]
fn labelled_address_belongs_to_interface() {
    let commands = [
        "link set lo up",
        "addr add 192.0.2.7/32 dev lo label lo:vip",
    ];
    let found = std::thread::spawn(move || interface_of("192.0.2.7", &commands));
    match found.join().unwrap() {
        Ok(found) => assert_eq!(found.as_deref(), Some("lo")),
        Err(why) => riser_testkit::skip::skip("a network namespace", &why),
    }
}
