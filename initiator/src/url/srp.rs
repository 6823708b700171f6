//! `srp://` addresses.
//!
//! ```text
//! srp://host[:port]/[lun][?key=value[&key=value…]]
//! ```
//!
//! The host can be an IPv4 address, an IPv6 address in brackets, or a name that must be resolved by
//! the caller. The default port is [`DEFAULT_PORT`]. The keys use the same names as the
//! `add_target` file in the Linux kernel, and have the same meaning; see the fields of [`SrpUrl`].
//! If the kernel uses hexadecimal numbers (`id_ext`, `ioc_guid`, `initiator_ext`, `service_id`,
//! `pkey`), they are also hexadecimal here, with an optional `0x` prefix; all other numbers are
//! decimal.
//!
//! All errors contain the invalid part of the address.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use riser_scsi::srp::{InitiatorPortId, PortIdParts, TargetPortId};

use super::grammar::{
    Authority, Host, Part, Portal, UrlError, check_portals, parse_lun, split_query, write_query,
};

/// Default RDMA/CM port for SRP targets.
const DEFAULT_PORT: u16 = 5555;

/// SRP target address and login parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SrpUrl {
    /// Target address or host name.
    pub host: Host,
    /// RDMA CM port number.
    pub port: u16,
    /// Logical unit number, if set.
    pub lun: Option<u16>,
    /// `id_ext`: first half of the target port identifier. Defaults to `ioc_guid`.
    pub id_ext: Option<u64>,
    /// `ioc_guid`: second half of the target port identifier. Defaults to zero, which is the
    /// default target of the listener.
    pub ioc_guid: Option<u64>,
    /// `service_id`: InfiniBand service ID; if not set, it is derived from the port.
    pub service_id: Option<u64>,
    /// `pkey`: partition key.
    pub pkey: Option<u16>,
    /// `initiator_ext`: first half of the initiator port identifier. Defaults to a random value.
    pub initiator_ext: Option<u64>,
    /// `queue_size`: max outstanding commands per channel, 1 to 4096.
    pub queue_size: Option<u16>,
    /// `max_it_iu_size`: max information unit length to request, in bytes.
    pub max_it_iu_size: Option<u32>,
    /// `cmd_sg_entries`: number of memory descriptors in a command, 1 to 255.
    pub cmd_sg_entries: Option<u8>,
    /// `allow_ext_sg`: allow descriptor tables outside of the command.
    pub allow_ext_sg: Option<bool>,
    /// `channels` (also `ch_count`): number of channels for the session, 1 to 64.
    pub channels: Option<u8>,
    /// `immediate`: request immediate data support.
    pub immediate: Option<bool>,
    /// `register_always`: register memory for each command. If not set, the target can read and
    /// write all data buffers in this process, for all sessions, until its session is closed.
    /// Should only be used with trusted targets.
    pub register_always: Option<bool>,
    /// `src`: local address to use for the connection.
    pub src: Option<IpAddr>,
    /// `portal`, can be used more than once: additional addresses for the same target port.
    pub portals: Vec<Portal>,
}

impl SrpUrl {
    /// Creates an address with no keys set.
    #[must_use]
    pub fn new(host: Host) -> Self {
        Self {
            host,
            port: DEFAULT_PORT,
            lun: None,
            id_ext: None,
            ioc_guid: None,
            service_id: None,
            pkey: None,
            initiator_ext: None,
            queue_size: None,
            max_it_iu_size: None,
            cmd_sg_entries: None,
            allow_ext_sg: None,
            channels: None,
            immediate: None,
            register_always: None,
            src: None,
            portals: Vec::new(),
        }
    }

    /// Returns the target port identifier for this address.
    #[must_use]
    pub fn target_port(&self) -> TargetPortId {
        let guid = self.ioc_guid.or(self.id_ext).unwrap_or(0);
        TargetPortId::from_parts(PortIdParts {
            extension: self.id_ext.unwrap_or(guid),
            guid,
        })
    }

    /// Returns the initiator port identifier for the login. The GUID is provided by the caller,
    /// with a default extension that is used if it's not set in the address.
    #[must_use]
    pub fn initiator_port(&self, defaults: PortIdParts) -> InitiatorPortId {
        InitiatorPortId::from_parts(PortIdParts {
            extension: self.initiator_ext.unwrap_or(defaults.extension),
            guid: defaults.guid,
        })
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), UrlError> {
        // We use the same keys as `ib_srp`, so that its parameters can be copied. Duplicate keys
        // are rejected, except for `portal`.
        let part = Part { key, value };
        match key {
            "id_ext" => part.once(&mut self.id_ext, Part::hex64),
            "ioc_guid" => part.once(&mut self.ioc_guid, Part::hex64),
            "service_id" => part.once(&mut self.service_id, Part::hex64),
            "pkey" => part.once(&mut self.pkey, Part::hex16),
            "initiator_ext" => part.once(&mut self.initiator_ext, Part::hex64),
            "queue_size" => part.once(&mut self.queue_size, |p| {
                p.number(1..=4096, "a number from 1 to 4096")
            }),
            "max_it_iu_size" => part.once(&mut self.max_it_iu_size, |p| {
                p.number(64..=1 << 20, "a number from 64 to 1048576")
            }),
            "cmd_sg_entries" => part.once(&mut self.cmd_sg_entries, |p| {
                p.number(1..=255, "a number from 1 to 255")
            }),
            "allow_ext_sg" => part.once(&mut self.allow_ext_sg, Part::flag),
            "channels" | "ch_count" => part.once(&mut self.channels, |p| {
                p.number(1..=64, "a number from 1 to 64")
            }),
            "immediate" => part.once(&mut self.immediate, Part::flag),
            "register_always" => part.once(&mut self.register_always, Part::flag),
            "src" => part.once(&mut self.src, Part::ip),
            "portal" => {
                self.portals.push(part.portal(DEFAULT_PORT)?);
                Ok(())
            }
            _ => Err(UrlError::UnknownKey(key.to_owned())),
        }
    }
}

impl FromStr for SrpUrl {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        let rest = text.strip_prefix("srp://").ok_or(UrlError::Scheme)?;
        let (rest, query) = split_query(rest);
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let authority: Authority = authority.parse()?;
        let mut url = Self::new(authority.host);
        url.port = authority.port.unwrap_or(DEFAULT_PORT);
        if !path.is_empty() {
            url.lun = Some(parse_lun(path)?);
        }
        for pair in query {
            let (key, value) = pair?;
            url.set(key, value)?;
        }
        check_portals(&url.host, url.port, &url.portals)?;
        Ok(url)
    }
}

impl fmt::Display for SrpUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "srp://{}", self.host)?;
        if self.port != DEFAULT_PORT {
            write!(f, ":{}", self.port)?;
        }
        f.write_str("/")?;
        if let Some(lun) = self.lun {
            write!(f, "{lun}")?;
        }
        let hex = |value: Option<u64>| value.map(|v| format!("{v:016x}"));
        let flag = |value: Option<bool>| value.map(|v| u8::from(v).to_string());
        let keys = [
            ("id_ext", hex(self.id_ext)),
            ("ioc_guid", hex(self.ioc_guid)),
            ("service_id", hex(self.service_id)),
            ("pkey", self.pkey.map(|v| format!("{v:04x}"))),
            ("initiator_ext", hex(self.initiator_ext)),
            ("queue_size", self.queue_size.map(|v| v.to_string())),
            ("max_it_iu_size", self.max_it_iu_size.map(|v| v.to_string())),
            ("cmd_sg_entries", self.cmd_sg_entries.map(|v| v.to_string())),
            ("allow_ext_sg", flag(self.allow_ext_sg)),
            ("channels", self.channels.map(|v| v.to_string())),
            ("immediate", flag(self.immediate)),
            ("register_always", flag(self.register_always)),
            ("src", self.src.map(|v| v.to_string())),
        ];
        write_query(f, keys, &self.portals)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::grammar::MAX_LUN;
    use super::*;

    fn parse(text: &str) -> Result<SrpUrl, UrlError> {
        text.parse()
    }

    #[test]
    fn minimal_address_uses_defaults() {
        let url = parse("srp://127.0.0.1").unwrap();
        assert_eq!(url.host, Host::Ip("127.0.0.1".parse().unwrap()));
        assert_eq!((url.port, url.lun), (5555, None));
        assert_eq!(url.target_port().0, [0; 16]);
        assert_eq!(url.to_string(), "srp://127.0.0.1/");
    }

    #[test]
    fn full_address_is_parsed() {
        let url = parse(
            "srp://[fe80::1]:6000/3?id_ext=0x505400fffe000001&ioc_guid=2&pkey=ffff&service_id=a\
             &initiator_ext=7&queue_size=128&max_it_iu_size=8260&cmd_sg_entries=12\
             &allow_ext_sg=1&ch_count=2&immediate=no&register_always=0&src=fe80::2",
        )
        .unwrap();
        assert_eq!(url.host, Host::Ip("fe80::1".parse().unwrap()));
        assert_eq!((url.port, url.lun), (6000, Some(3)));
        let target = url.target_port().parts();
        assert_eq!((target.extension, target.guid), (0x5054_00ff_fe00_0001, 2));
        let initiator = url
            .initiator_port(PortIdParts {
                extension: 1,
                guid: 9,
            })
            .parts();
        assert_eq!((initiator.extension, initiator.guid), (7, 9));
        assert_eq!(url.queue_size, Some(128));
        assert_eq!(url.cmd_sg_entries, Some(12));
        assert_eq!(url.allow_ext_sg, Some(true));
        assert_eq!(url.channels, Some(2));
        assert_eq!(
            (url.immediate, url.register_always),
            (Some(false), Some(false))
        );
        assert_eq!(url.src, Some("fe80::2".parse().unwrap()));
        assert_eq!(parse(&url.to_string()), Ok(url));
    }

    #[test]
    fn errors_contain_invalid_part() {
        for (text, message) in [
            (
                "http://x",
                "address must start with `srp://`, `iscsi://` or `iser://`",
            ),
            ("srp://", "host `` is not an address or a name"),
            ("srp://1.2.3", "host `1.2.3` is not an address or a name"),
            ("srp://fe80::1", "host `fe80:` is not an address or a name"),
            (
                "srp://[fe80::1",
                "host `[fe80::1` is not an address or a name",
            ),
            ("srp://a b", "host `a b` is not an address or a name"),
            ("srp://h:0", "port `0` is not a number from 1 to 65535"),
            ("srp://h:+1", "port `+1` is not a number from 1 to 65535"),
            ("srp://h:", "port `` is not a number from 1 to 65535"),
            (
                "srp://h/x",
                "logical unit `x` is not a number from 0 to 16383",
            ),
            (
                "srp://h/16384",
                "logical unit `16384` is not a number from 0 to 16383",
            ),
            ("srp://h/0?qs=1", "unknown key `qs`"),
            ("srp://h/0?queue_size", "missing value of key `queue_size`"),
            ("srp://h/0?", "missing value of key ``"),
            ("srp://h/0?pkey=", "missing value of key `pkey`"),
            (
                "srp://h/0?ch_count=1&channels=1",
                "key `channels` occurs twice",
            ),
            (
                "srp://h/0?queue_size=0",
                "value `0` of key `queue_size` is not a number from 1 to 4096",
            ),
            (
                "srp://h/0?id_ext=12345678123456781",
                "value `12345678123456781` of key `id_ext` is not a hexadecimal number of at most \
                 16 digits",
            ),
            (
                "srp://h/0?src=h",
                "value `h` of key `src` is not an IP address",
            ),
        ] {
            assert_eq!(parse(text).unwrap_err().to_string(), message, "{text}");
        }
    }

    #[test]
    fn target_port_half_implies_other() {
        let url = parse("srp://h/?ioc_guid=5").unwrap();
        assert_eq!(url.target_port().parts().extension, 5);
        let url = parse("srp://h/?id_ext=6").unwrap();
        assert_eq!(url.target_port().parts().guid, 6);
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(text: String) {
            let _ = parse(&text);
            let _ = parse(&format!("srp://{text}"));
        }

        #[test]
        fn formatted_address_round_trips(
            ip: IpAddr,
            port in 1u16..,
            lun in proptest::option::of(0..=MAX_LUN),
            ids: (Option<u64>, Option<u64>, Option<u64>),
            queue in proptest::option::of(1u16..=4096),
            flags: (Option<bool>, Option<bool>),
        ) {
            let mut url = SrpUrl::new(Host::Ip(ip));
            (url.port, url.lun, url.queue_size) = (port, lun, queue);
            (url.id_ext, url.ioc_guid, url.initiator_ext) = ids;
            (url.allow_ext_sg, url.immediate) = flags;
            prop_assert_eq!(parse(&url.to_string()), Ok(url));
        }
    }
}
