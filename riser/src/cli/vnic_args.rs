//! Options of `riser vnic`.

use std::net::IpAddr;
use std::time::Duration;

use riser_fabric::vnic::wire::Mac;
use riser_fabric::vnic::{MAX_ETH_MTU, MAX_VESW_ID};

use super::units;

/// Minimum MTU of an interface, as required by IPv6.
const MIN_MTU: i64 = 1280;

/// Arguments of `riser vnic`.
#[derive(Clone, Debug, clap::Args)]
pub struct VnicArgs {
    /// Use this local address for the software NIC
    #[arg(long, value_name = "IP")]
    pub addr: IpAddr,
    /// Set the name of the interface; repeat to add interfaces for further switches of the manager
    #[arg(long, value_name = "NAME", default_value = "vnic0")]
    pub name: Vec<String>,
    /// Use this multicast group, which must be the same for all members [default: 239.255.86.78, or
    /// ff15::564e for an IPv6 address]
    #[arg(long, value_name = "IP")]
    pub group: Option<IpAddr>,
    /// Set the MAC address of the first interface [default: assigned by the manager]
    #[arg(long, value_name = "MAC", value_parser = mac)]
    pub mac: Option<Mac>,
    /// Only accept the manager at this address [default: the first manager found]
    #[arg(long, value_name = "IP")]
    pub manager: Option<IpAddr>,
    /// Also act as the manager of the Ethernet, which must only have one
    #[arg(long)]
    pub manage: bool,
    /// Set the ID of the virtual switch, 1 to 4095; repeat to add switches for further interfaces
    /// of the members
    #[arg(long, value_name = "N", default_value = "1", requires = "manage",
          value_parser = clap::value_parser!(u16).range(1..=MAX_VESW_ID as i64))]
    pub switch: Vec<u16>,
    /// Set the MTU of all members' interfaces in bytes, 1280 to 9216; repeat to set it for each
    /// switch
    #[arg(long, value_name = "BYTES", default_value = "1500", requires = "manage",
          value_parser = clap::value_parser!(u16).range(MIN_MTU..=MAX_ETH_MTU as i64))]
    pub mtu: Vec<u16>,
    /// Query members at this interval, 100 ms to 5 s
    #[arg(long, value_name = "DURATION", default_value = "1s", requires = "manage",
          value_parser = units::duration)]
    pub interval: Duration,
    /// Remove a member if it does not respond for this time; must be longer than the interval
    #[arg(long, value_name = "DURATION", default_value = "5s", requires = "manage",
          value_parser = units::duration)]
    pub dead_after: Duration,
}

/// Parses a unicast MAC address.
fn mac(text: &str) -> Result<Mac, String> {
    let bytes: Option<Vec<u8>> = text.split(':').map(byte).collect();
    let bytes = bytes.and_then(|bytes| <[u8; 6]>::try_from(bytes).ok());
    let mac = Mac(bytes.ok_or("invalid MAC address: expected six hexadecimal bytes with colons")?);
    match mac.is_multicast() || mac.is_zero() {
        true => Err("not a unicast address".into()),
        false => Ok(mac),
    }
}

fn byte(text: &str) -> Option<u8> {
    let is_hex = (1..=2).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit());
    u8::from_str_radix(text, 16).ok().filter(|_| is_hex)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unicast_addresses_are_parsed() {
        assert_eq!(mac("02:0:00:aB:c:1"), Ok(Mac([2, 0, 0, 0xab, 0xc, 1])));
        for wrong in [
            "",
            "02:00:00:00:00",
            "02:00:00:00:00:00:00",
            "01:00:00:00:00:01",
            "00:00:00:00:00:00",
            "02:00:00:00:00:+1",
            "02:00:00:00:00:100",
        ] {
            assert!(mac(wrong).is_err(), "{wrong}");
        }
    }
}
