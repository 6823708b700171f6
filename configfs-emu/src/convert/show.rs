//! Adds a target to a tree, using the same operations that a user would use.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use riser_config::{
    Access, Chap, ChapUser, Config, InitiatorId, Listen, Net, Protocol, Rule, Secret, Target,
    Wildcard,
};
use rustix::io::Errno;
use serde_json::Value;

use super::access::ANY;
use super::origin;
use crate::rules::{Fabric, Shell, Tree, backend_name, device};
use crate::tree::NodeId;
use crate::world::World;

/// A target in the configuration that should be shown.
pub(super) struct Show<'a> {
    pub(super) world: &'a dyn World,
    pub(super) config: &'a Config,
    pub(super) target: &'a Target,
}

/// Returns a copy of the tree that contains the target, and its portal group.
pub(super) fn show_target(tree: &Tree, show: &Show<'_>) -> Result<(Tree, Fabric, NodeId), String> {
    let mut tree = tree.clone();
    let portals = &show.target.portals;
    let is_iscsi = portals.iter().all(|p| p.protocol.is_iscsi());
    let (fabric, path) = match (is_iscsi, portals.as_slice(), &show.target.iqn) {
        (true, _, Some(iqn)) => (Fabric::Iscsi, format!("iscsi/{iqn}/tpgt_1")),
        (false, [portal], _) => {
            let at = portal.listen.at();
            let at = at.ok_or("an SRP port of LIO has a single address")?;
            // In LIO, the name of a port is its GUID or GID. From an address, we can only get the
            // GID.
            let gid = match at.ip() {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            let port = format!("srpt/0x{:032x}", gid.to_bits());
            (Fabric::Srpt, format!("{port}/tpgt_1"))
        }
        _ => return Err("it has several SRP portals, or also an iSCSI portal".to_owned()),
    };
    let mut hand = GroupShell {
        shell: Shell {
            tree: &mut tree,
            world: show.world,
        },
        path,
    };
    hand.fill(fabric, show)?;
    let tpg = format!("target/{}", hand.path);
    let tpg = tree.find(&tpg).expect("it was made");
    Ok((tree, fabric, tpg))
}

/// Adds the CHAP settings for discovery.
pub(super) fn show_discovery(
    tree: &mut Tree,
    world: &dyn World,
    doc: &Value,
) -> Result<(), String> {
    let mut hand = GroupShell {
        shell: Shell { tree, world },
        path: "iscsi/discovery_auth".to_owned(),
    };
    hand.ensure("iscsi")?;
    for (user, names) in [
        (&doc["users"][0], ["userid", "password"]),
        (&doc["mutual"], ["userid_mutual", "password_mutual"]),
    ] {
        for (name, key) in names.into_iter().zip(["name", "secret"]) {
            if let Some(value) = user[key].as_str() {
                hand.write(name, value)?;
            }
        }
    }
    hand.write("enforce_discovery_auth", "1")
}

/// A shell that uses a portal group as its directory.
struct GroupShell<'a> {
    shell: Shell<'a>,
    path: String,
}

/// Returns a function that adds the path to an error.
fn refused(path: &str) -> impl Fn(Errno) -> String {
    move |errno| format!("LIO has no equivalent: {errno} at {path}")
}

impl GroupShell<'_> {
    fn ensure(&mut self, path: &str) -> Result<(), String> {
        match self.shell.mkdir(path) {
            Ok(_) | Err(Errno::EXIST) => Ok(()),
            Err(errno) => Err(refused(path)(errno)),
        }
    }

    fn mkdir(&mut self, path: &str) -> Result<NodeId, String> {
        let path = format!("{}/{path}", self.path);
        self.shell.mkdir(&path).map_err(refused(&path))
    }

    fn write(&mut self, path: &str, text: &str) -> Result<(), String> {
        let path = format!("{}/{path}", self.path);
        self.shell.write(&path, text).map_err(refused(&path))
    }

    fn link(&mut self, path: &str, target: NodeId) -> Result<(), String> {
        let target = format!("/{}", self.shell.tree.path(target));
        let path = format!("{}/{path}/shown", self.path);
        self.shell.link(&path, &target).map_err(refused(&path))
    }

    fn fill(&mut self, fabric: Fabric, show: &Show<'_>) -> Result<(), String> {
        let target = show.target;
        self.ensure(fabric.name())?;
        let (wwn, _) = self.path.rsplit_once('/').expect("it ends in a group");
        let (_, name) = wwn.rsplit_once('/').expect("it begins with a fabric");
        let is_served = fabric == Fabric::Iscsi || !show.world.port_addresses(name).is_empty();
        if !is_served {
            return Err(
                "its portal is not on an address of this host, and LIO only has ports of its host"
                    .into(),
            );
        }
        self.shell.mkdir(wwn).map_err(refused(wwn))?;
        self.shell.mkdir(&self.path).map_err(refused(&self.path))?;
        match fabric {
            Fabric::Iscsi => self.portals(target)?,
            Fabric::Srpt => {
                let port = target.portals[0].listen.port().to_string();
                let file = "srpt/discovery_auth/rdma_cm_port";
                self.shell.write(file, &port).map_err(refused(file))?;
            }
        }
        let mut luns = BTreeMap::new();
        for (number, lun) in &target.luns {
            let name = &show.config.backend(lun).name;
            let mut devices = device::devices(self.shell.tree).into_iter();
            let device = devices.find(|(id, _)| backend_name(self.shell.tree, *id) == *name);
            let (device, _) =
                device.ok_or_else(|| format!("backend {name} of LUN {number} is not shown"))?;
            let id = self.mkdir(&format!("lun/lun_{number}"))?;
            self.link(&format!("lun/lun_{number}"), device)?;
            luns.insert(*number, id);
        }
        // This value is used as the default for entries that don't set it, so we only need to write
        // exceptions later.
        if fabric == Fabric::Iscsi {
            let wanted = u8::from(all_authenticate(target)).to_string();
            self.write("attrib/authentication", &wanted)?;
        }
        match &target.access {
            Access::Open if fabric == Fabric::Srpt => {
                return Err("LIO has no open access for SRP".to_owned());
            }
            Access::Open => self.open(target, None)?,
            Access::Rules(rules) => {
                let (known, others) = split_rest(rules);
                for rule in known {
                    self.rule(rule, target, &luns)?;
                }
                if let Some(rule) = others {
                    self.open(target, Some(rule))?;
                }
            }
        }
        // This must be the last step, because an enabled group is treated as served.
        self.write("enable", "1")
    }

    fn portals(&mut self, target: &Target) -> Result<(), String> {
        let listens: BTreeSet<Listen> = target.portals.iter().map(|p| p.listen).collect();
        for listen in listens {
            let np = np_of(&listen);
            let np = np.ok_or_else(|| format!("LIO does not support a portal at {listen}"))?;
            let id = self.mkdir(&format!("np/{np}"))?;
            let speaks = |protocol| {
                let mut all = target.portals.iter();
                all.any(|p| p.listen == listen && p.protocol == protocol)
            };
            if speaks(Protocol::Iser) {
                self.write(&format!("np/{np}/iser"), "1")?;
            }
            if !speaks(Protocol::Iscsi) {
                self.shell.tree.set(id, origin::NO_TCP, "1");
            }
        }
        Ok(())
    }

    /// Allows access to all LUNs for all other initiators, either with a rule or if there are no
    /// rules.
    fn open(&mut self, target: &Target, rule: Option<&Rule>) -> Result<(), String> {
        self.write("attrib/generate_node_acls", "1")?;
        let seen = target.seen_by(rule.and_then(|rule| rule.luns.as_ref()));
        let read_only = seen.values().any(|seen| seen.read_only);
        self.write(
            "attrib/demo_mode_write_protect",
            &u8::from(read_only).to_string(),
        )?;
        let own = rule.and_then(|rule| rule.chap.as_ref());
        self.login("auth", own.or(target.chap.as_ref()))
    }

    fn rule(
        &mut self,
        rule: &Rule,
        target: &Target,
        luns: &BTreeMap<u16, NodeId>,
    ) -> Result<(), String> {
        let name = match (&rule.iqn, &rule.initiator, &rule.address) {
            (Some(iqn), None, None) => iqn.to_string(),
            (None, Some(InitiatorId::Port(id)), None) => {
                format!("0x{:032x}", u128::from_be_bytes(*id))
            }
            (None, Some(InitiatorId::Guid(guid)), None) => {
                let digits = format!("{:016x}", guid.0);
                let parts = [0, 4, 8, 12].map(|at| &digits[at..at + 4]);
                parts.join(":")
            }
            (None, None, Some(net)) => {
                let address = single(net);
                let address = address.ok_or_else(|| format!("LIO has no ACL for network {net}"))?;
                address.to_string()
            }
            // An entry in LIO only has a single name. If we used just one of the conditions, more
            // initiators would get access.
            _ => return Err("LIO has no ACL for a rule with two conditions".to_owned()),
        };
        let acl = format!("acls/{name}");
        self.mkdir(&acl)?;
        for (number, seen) in target.seen_by(rule.luns.as_ref()) {
            let mapped = format!("{acl}/lun_{number}");
            self.mkdir(&mapped)?;
            self.link(&mapped, luns[&seen.number])?;
            let protect = u8::from(seen.read_only).to_string();
            self.write(&format!("{mapped}/write_protect"), &protect)?;
        }
        if rule.iqn.is_some() {
            let chap = rule.chap.as_ref().or(target.chap.as_ref());
            if chap.is_some() && !all_authenticate(target) {
                self.write(&format!("{acl}/attrib/authentication"), "1")?;
            }
            self.login(&format!("{acl}/auth"), chap)?;
        }
        Ok(())
    }

    fn login(&mut self, auth: &str, chap: Option<&Chap>) -> Result<(), String> {
        let Some(chap) = chap else {
            return Ok(());
        };
        let [user] = chap.users.as_slice() else {
            return Err("LIO supports a single user per initiator".to_owned());
        };
        self.user(auth, user, ["userid", "password"])?;
        match &chap.mutual {
            Some(mutual) => self.user(auth, mutual, ["userid_mutual", "password_mutual"]),
            None => Ok(()),
        }
    }

    /// Writes a name and secret. The secret must not be read from a file, because the tree would
    /// show it.
    fn user(&mut self, auth: &str, user: &ChapUser, files: [&str; 2]) -> Result<(), String> {
        let Secret::Inline(secret) = &user.secret else {
            return Err("its CHAP secret is not part of the configuration".to_owned());
        };
        self.write(&format!("{auth}/{}", files[0]), &user.name)?;
        self.write(&format!("{auth}/{}", files[1]), secret)
    }
}

/// Returns the name of a portal. In LIO, the unspecified IPv6 address also includes IPv4, and there
/// is no support for interfaces.
fn np_of(listen: &Listen) -> Option<String> {
    match listen {
        Listen::At(_) | Listen::Wildcard(Wildcard::V4, _) => Some(listen.to_string()),
        Listen::Wildcard(Wildcard::All, port) => Some(format!("[::]:{port}")),
        Listen::Wildcard(Wildcard::V6 | Wildcard::Interface(_), _) => None,
    }
}

/// Splits off the last rules if they are for all other initiators: LIO uses two rules for this, for
/// all IPv4 and all IPv6 addresses.
fn split_rest(rules: &[Rule]) -> (&[Rule], Option<&Rule>) {
    let net = |rule: &Rule| match (&rule.iqn, &rule.initiator, &rule.address) {
        (None, None, Some(net)) => net.to_string(),
        _ => String::new(),
    };
    match rules {
        [known @ .., v4, v6]
            if net(v4) == ANY[0]
                && net(v6) == ANY[1]
                && v4.luns == v6.luns
                && v4.chap == v6.chap =>
        {
            (known, Some(v4))
        }
        _ => (rules, None),
    }
}

/// Returns true if all initiators must authenticate.
fn all_authenticate(target: &Target) -> bool {
    let by_rule = match &target.access {
        Access::Open => false,
        Access::Rules(rules) => !rules.is_empty() && rules.iter().all(|rule| rule.chap.is_some()),
    };
    target.chap.is_some() || by_rule
}

/// Returns the address if this network contains just one.
fn single(net: &Net) -> Option<IpAddr> {
    net.single()
}
