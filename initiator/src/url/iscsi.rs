//! `iscsi://` and `iser://` addresses, using the libiscsi format.
//!
//! ```text
//! iscsi://[user[%password]@]host[:port]/[target[/lun]][?key=value[&key=value…]]
//! ```
//!
//! The host can be an IPv4 address, an IPv6 address in brackets, or a name that must be resolved by
//! the caller. The default port is 3260. For the supported keys, see the fields of [`IscsiUrl`].
//!
//! # Passwords
//! If a password is part of the address, it is visible to all users who can list processes. To
//! avoid this, it can also be stored in a file (`password_file`) or an environment variable
//! ([`SECRET_ENV`](super::SECRET_ENV)); [`IscsiUrl::credentials`] checks in this order. Display and
//! Debug never print a password.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;

use riser_scsi::iscsi::chap::{Algorithm, Credentials};
use riser_scsi::iscsi::name::{IscsiName, PORT};

use super::grammar::{
    Authority, Host, Part, Portal, UrlError, check_portals, parse_lun, split_query, write_query,
};
use super::secret::{PASSWORD_ENV, Secret, SecretError, Secrets, TARGET_PASSWORD_ENV, User};

/// PDU transport.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Carrier {
    /// iSCSI over TCP (RFC 7143).
    #[default]
    Tcp,
    /// RDMA, using iSER (RFC 7145).
    Iser,
}

/// iSCSI target address and login parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IscsiUrl {
    /// PDU transport, depending on the scheme.
    pub carrier: Carrier,
    /// Portal address or host name.
    pub host: Host,
    /// Portal port number.
    pub port: u16,
    /// Target name, if set.
    pub target: Option<IscsiName>,
    /// Logical unit number, if set.
    pub lun: Option<u16>,
    /// `user` and `password` before the host, `password_file`: initiator credentials.
    pub user: User,
    /// `target_user`, `target_password`, `target_password_file`: credentials which must be used by
    /// the target.
    pub target_user: User,
    /// `chap`: comma-separated list of CHAP digests, in order of preference: `md5`, `sha1`,
    /// `sha256`, `sha3-256`.
    pub chap: Option<Vec<Algorithm>>,
    /// `initiator`: initiator name for the login.
    pub initiator: Option<IscsiName>,
    /// `header_digest`: `crc32c` requires a digest, `none` disables it.
    pub header_digest: Option<bool>,
    /// `data_digest`: same as `header_digest`.
    pub data_digest: Option<bool>,
    /// `immediate_data`: allow data in the command PDU.
    pub immediate_data: Option<bool>,
    /// `initial_r2t`: require an R2T for all other data.
    pub initial_r2t: Option<bool>,
    /// `first_burst`: max unsolicited data for a command, in bytes.
    pub first_burst: Option<u32>,
    /// `max_burst`: max data PDU sequence, in bytes.
    pub max_burst: Option<u32>,
    /// `max_recv`: max data segment to receive, in bytes.
    pub max_recv: Option<u32>,
    /// `queue_size`: max outstanding commands, 1 to 4096.
    pub queue_size: Option<u16>,
    /// `src`: local address to use for the connection.
    pub src: Option<IpAddr>,
    /// `portal`, can be used more than once: additional portals for the same target.
    pub portals: Vec<Portal>,
    /// `paths=all`: use all addresses of the host name, and all portals reported by the target.
    pub all_paths: bool,
}

const LENGTH: &str = "a number from 512 to 16777215";

impl IscsiUrl {
    /// Creates an address with no keys set.
    #[must_use]
    pub fn new(carrier: Carrier, host: Host) -> Self {
        Self {
            carrier,
            host,
            port: PORT,
            target: None,
            lun: None,
            user: User::default(),
            target_user: User::default(),
            chap: None,
            initiator: None,
            header_digest: None,
            data_digest: None,
            immediate_data: None,
            initial_r2t: None,
            first_burst: None,
            max_burst: None,
            max_recv: None,
            queue_size: None,
            src: None,
            portals: Vec::new(),
            all_paths: false,
        }
    }

    /// Returns whether the address uses RDMA.
    #[must_use]
    pub fn is_iser(&self) -> bool {
        self.carrier == Carrier::Iser
    }

    /// Returns the initiator credentials and the target credentials, using passwords from the
    /// address, a file or the environment.
    ///
    /// # Errors
    /// Returns [`SecretError`] if a password is not available.
    pub fn credentials(&self) -> Result<(Option<Credentials>, Option<Credentials>), SecretError> {
        let own = self.user.credentials(PASSWORD_ENV)?;
        let target = self.target_user.credentials(TARGET_PASSWORD_ENV)?;
        if own.is_none() && target.is_some() {
            return Err(SecretError::OneSided);
        }
        // RFC 7143 9.2.1: if both secrets are the same, a target without the secret could use us to
        // compute the response for it.
        if let (Some(own), Some(target)) = (&own, &target)
            && own.secret == target.secret
        {
            return Err(SecretError::Same);
        }
        Ok((own, target))
    }

    /// Removes all passwords from the address and the environment, so the address can be visible to
    /// other processes. Password files are not changed.
    pub fn take_secrets(&mut self) -> Secrets {
        let take = |user: &mut User, env: &str| {
            let wanted = user.name.is_some() && user.file.is_none();
            let given = user.password.take();
            given.or_else(|| std::env::var(env).ok().filter(|_| wanted).map(Secret::new))
        };
        Secrets {
            password: take(&mut self.user, PASSWORD_ENV),
            target_password: take(&mut self.target_user, TARGET_PASSWORD_ENV),
        }
    }

    /// Restores passwords that were removed.
    pub fn put_secrets(&mut self, secrets: Secrets) {
        if secrets.password.is_some() {
            self.user.password = secrets.password;
        }
        if secrets.target_password.is_some() {
            self.target_user.password = secrets.target_password;
        }
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), UrlError> {
        // Reject duplicate keys except for `portal`, because it wouldn't be clear which value
        // should be used.
        let part = Part { key, value };
        let path = |p: &Part<'_>| Ok(PathBuf::from(p.value));
        let length = |p: &Part<'_>| p.number(512..=(1 << 24) - 1, LENGTH);
        match key {
            "password_file" => part.once(&mut self.user.file, path),
            "target_user" => part.once(&mut self.target_user.name, |p| Ok(p.value.to_owned())),
            "target_password" => {
                part.once(&mut self.target_user.password, |p| Ok(Secret::new(p.value)))
            }
            "target_password_file" => part.once(&mut self.target_user.file, path),
            "chap" => part.once(&mut self.chap, algorithms),
            "initiator" => part.once(&mut self.initiator, |p| name(p.value)),
            "header_digest" => part.once(&mut self.header_digest, digest),
            "data_digest" => part.once(&mut self.data_digest, digest),
            "immediate_data" => part.once(&mut self.immediate_data, Part::flag),
            "initial_r2t" => part.once(&mut self.initial_r2t, Part::flag),
            "first_burst" => part.once(&mut self.first_burst, length),
            "max_burst" => part.once(&mut self.max_burst, length),
            "max_recv" => part.once(&mut self.max_recv, length),
            "queue_size" => part.once(&mut self.queue_size, |p| {
                p.number(1..=4096, "a number from 1 to 4096")
            }),
            "src" => part.once(&mut self.src, Part::ip),
            "portal" => {
                self.portals.push(part.portal(PORT)?);
                Ok(())
            }
            "paths" if value == "all" => {
                self.all_paths = true;
                Ok(())
            }
            "paths" => Err(part.bad("`all`")),
            _ => Err(UrlError::UnknownKey(key.to_owned())),
        }
    }
}

fn name(text: &str) -> Result<IscsiName, UrlError> {
    IscsiName::new(text).map_err(|why| UrlError::Target {
        name: text.to_owned(),
        why,
    })
}

const ALGORITHM_NAMES: [(&str, Algorithm); 4] = [
    ("md5", Algorithm::Md5),
    ("sha1", Algorithm::Sha1),
    ("sha256", Algorithm::Sha256),
    ("sha3-256", Algorithm::Sha3_256),
];

fn algorithms(part: &Part<'_>) -> Result<Vec<Algorithm>, UrlError> {
    let one = |name: &str| {
        let known = ALGORITHM_NAMES.iter().find(|(known, _)| *known == name);
        known.map(|(_, algorithm)| *algorithm)
    };
    let all: Option<Vec<_>> = part.value.split(',').map(one).collect();
    all.ok_or_else(|| part.bad("a list of `md5`, `sha1`, `sha256`, `sha3-256`"))
}

fn algorithm_names(algorithms: &[Algorithm]) -> String {
    let name = |algorithm| {
        let known = ALGORITHM_NAMES
            .iter()
            .find(|(_, known)| *known == algorithm);
        known.map_or("", |(name, _)| *name)
    };
    let names: Vec<_> = algorithms.iter().map(|a| name(*a)).collect();
    names.join(",")
}

fn digest(part: &Part<'_>) -> Result<bool, UrlError> {
    match part.value.to_ascii_lowercase().as_str() {
        "crc32c" => Ok(true),
        "none" => Ok(false),
        _ => Err(part.bad("`crc32c` or `none`")),
    }
}

impl FromStr for IscsiUrl {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        let (carrier, rest) = match text.split_once("://") {
            Some(("iscsi", rest)) => (Carrier::Tcp, rest),
            Some(("iser", rest)) => (Carrier::Iser, rest),
            _ => return Err(UrlError::Scheme),
        };
        let (rest, query) = split_query(rest);
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        // Use the last separator, because a password can contain this character.
        let (user, authority) = match authority.rsplit_once('@') {
            Some((user, authority)) => (Some(user), authority),
            None => (None, authority),
        };
        let authority: Authority = authority.parse()?;
        let mut url = Self::new(carrier, authority.host);
        url.port = authority.port.unwrap_or(PORT);
        if let Some(user) = user {
            let (name, password) = match user.split_once('%') {
                Some((name, password)) => (name, Some(password)),
                None => (user, None),
            };
            if name.is_empty() {
                return Err(UrlError::NoUser);
            }
            url.user.name = Some(name.to_owned());
            url.user.password = password.map(Secret::new);
        }
        let (target, lun) = match path.split_once('/') {
            Some((target, lun)) => (target, Some(lun).filter(|l| !l.is_empty())),
            None => (path, None),
        };
        if !target.is_empty() {
            url.target = Some(name(target)?);
        }
        if let Some(lun) = lun {
            if url.target.is_none() {
                return Err(UrlError::Lun(lun.to_owned()));
            }
            url.lun = Some(parse_lun(lun)?);
        }
        for pair in query {
            let (key, value) = pair?;
            url.set(key, value)?;
        }
        check_portals(&url.host, url.port, &url.portals)?;
        Ok(url)
    }
}

/// Formats the address without passwords.
impl fmt::Display for IscsiUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.carrier {
            Carrier::Tcp => "iscsi://",
            Carrier::Iser => "iser://",
        })?;
        if let Some(user) = &self.user.name {
            write!(f, "{user}@")?;
        }
        self.host.fmt(f)?;
        if self.port != PORT {
            write!(f, ":{}", self.port)?;
        }
        f.write_str("/")?;
        if let Some(target) = &self.target {
            target.fmt(f)?;
            if let Some(lun) = self.lun {
                write!(f, "/{lun}")?;
            }
        }
        // We skip default values, so that an address doesn't get longer when it is parsed and
        // formatted again. Passwords must never be included, because the text is used in logs and
        // lists.
        let digest = |on: Option<bool>| on.map(|on| if on { "crc32c" } else { "none" }.to_owned());
        let flag = |on: Option<bool>| on.map(|on| u8::from(on).to_string());
        let file = |user: &User| user.file.as_ref().map(|p| p.display().to_string());
        let keys = [
            ("password_file", file(&self.user)),
            ("target_user", self.target_user.name.clone()),
            ("target_password_file", file(&self.target_user)),
            ("chap", self.chap.as_deref().map(algorithm_names)),
            (
                "initiator",
                self.initiator.as_ref().map(ToString::to_string),
            ),
            ("header_digest", digest(self.header_digest)),
            ("data_digest", digest(self.data_digest)),
            ("immediate_data", flag(self.immediate_data)),
            ("initial_r2t", flag(self.initial_r2t)),
            ("first_burst", self.first_burst.map(|n| n.to_string())),
            ("max_burst", self.max_burst.map(|n| n.to_string())),
            ("max_recv", self.max_recv.map(|n| n.to_string())),
            ("queue_size", self.queue_size.map(|n| n.to_string())),
            ("src", self.src.map(|ip| ip.to_string())),
            ("paths", self.all_paths.then(|| "all".to_owned())),
        ];
        write_query(f, keys, &self.portals)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<IscsiUrl, UrlError> {
        text.parse()
    }

    #[test]
    fn libiscsi_address_is_parsed() {
        let url = parse("iscsi://me%se@cret@[::1]:3261/iqn.2026-01.com.example:disk/3").unwrap();
        assert_eq!(url.host, Host::Ip("::1".parse().unwrap()));
        assert_eq!((url.port, url.lun), (3261, Some(3)));
        assert_eq!(
            url.target.as_ref().unwrap().as_str(),
            "iqn.2026-01.com.example:disk"
        );
        let (own, target) = url.credentials().unwrap();
        assert_eq!(own.unwrap().secret, b"se@cret");
        assert!(target.is_none());
        let shown = url.to_string();
        assert_eq!(
            shown,
            "iscsi://me@[::1]:3261/iqn.2026-01.com.example:disk/3"
        );
        assert!(!format!("{url:?}").contains("se@cret"));
    }

    #[test]
    fn portal_and_all_keys_are_parsed() {
        let url = parse("iser://host").unwrap();
        assert!(url.is_iser() && url.target.is_none() && url.port == 3260);
        let text = "iscsi://u@h/iqn.2026-01.a:b?password_file=/p&target_user=t\
                    &target_password_file=/q&chap=sha1,md5&initiator=iqn.2026-01.a:i&header_digest=crc32c\
                    &data_digest=none&immediate_data=0&initial_r2t=1&first_burst=4096\
                    &max_burst=8192&max_recv=65536&queue_size=7&src=127.0.0.2";
        let url = parse(text).unwrap();
        assert_eq!(
            (url.header_digest, url.data_digest),
            (Some(true), Some(false))
        );
        assert_eq!(parse(&url.to_string()), Ok(url));
    }

    #[test]
    fn further_portals_are_read_and_written() {
        let text =
            "iser://10.0.0.1/iqn.2026-01.a:d/0?portal=10.0.0.2&portal=[fd00::2]:3261&paths=all";
        let url = parse(text).unwrap();
        let portals: Vec<_> = url.portals.iter().map(ToString::to_string).collect();
        assert_eq!(portals, ["10.0.0.2:3260", "[fd00::2]:3261"]);
        assert!(url.all_paths);
        assert_eq!(parse(&url.to_string()), Ok(url));
        let url: crate::url::TargetUrl = text.parse().unwrap();
        assert!(url.is_multipath());
        assert_eq!(url.first().to_string(), "iser://10.0.0.1/iqn.2026-01.a:d/0");
        let last = url.by(url.portals()[1].clone());
        assert_eq!(last.to_string(), "iser://[fd00::2]:3261/iqn.2026-01.a:d/0");
    }

    #[test]
    fn errors_contain_invalid_part() {
        for (text, part) in [
            (
                "iscsi://h/?portal=1:2:3",
                "`1:2:3` of key `portal` is not HOST",
            ),
            ("iscsi://h/?portal=x:0", "`x:0` of key `portal` is not HOST"),
            ("iscsi://h/?portal=", "missing value of key `portal`"),
            (
                "iscsi://h/?portal=h:3260",
                "duplicate portal `h:3260`; each path requires a separate portal",
            ),
            (
                "iscsi://h/?portal=i&portal=i",
                "duplicate portal `i:3260`; each path requires a separate portal",
            ),
            ("iscsi://h/?paths=2", "`2` of key `paths` is not `all`"),
            ("nvme://h", "iscsi://"),
            ("iscsi://%pw@h", "missing user"),
            ("iscsi://h/disk", "disk"),
            ("iscsi://h/iqn.2026-01.a:b/x", "`x`"),
            ("iscsi://h//1", "`1`"),
            ("iscsi://h:0/", "`0`"),
            ("iscsi://h/?header_digest=md5", "header_digest"),
            ("iscsi://h/?chap=md5,md4", "chap"),
            ("iscsi://h/?max_burst=5", "max_burst"),
            ("iscsi://h/?what=1", "what"),
            ("iscsi://h/?src=1.2.3.4&src=1.2.3.4", "twice"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn passwords_are_read_and_checked() {
        let path = std::env::temp_dir().join(format!("riser-secret-{}", std::process::id()));
        std::fs::write(&path, "from the file\nrest\n").unwrap();
        let text = format!("iscsi://u@h/?password_file={}", path.display());
        let (own, _) = parse(&text).unwrap().credentials().unwrap();
        assert_eq!(own.unwrap().secret, b"from the file");
        std::fs::remove_file(&path).unwrap();
        let gone = parse(&text).unwrap().credentials().unwrap_err();
        assert!(gone.to_string().contains("cannot read"), "{gone}");
        let mutual = parse("iscsi://h/?target_user=t&target_password=p").unwrap();
        assert!(matches!(mutual.credentials(), Err(SecretError::OneSided)));
        let one = parse("iscsi://u%twelve-bytes@h/?target_user=t&target_password=twelve-bytes");
        assert!(matches!(one.unwrap().credentials(), Err(SecretError::Same)));
    }
}
