//! Converts a document to a tree.
//!
//! We add each backend and target to a copy of the tree. If exporting this copy returns the same
//! meaning, it's used as the new tree. Otherwise, we keep the original part of the document.

use std::collections::{BTreeMap, BTreeSet};

use riser_config::{Access, Chap, ChapUser, Config, HostId, Rule, SeenLun};
use rustix::io::Errno;
use serde_json::{Map, Value};

use super::access::Group;
use super::show::{Show, show_discovery, show_target};
use super::{Rest, backend, export, origin};
use crate::rules::device::{self, PAGE, option};
use crate::rules::{Fabric, Kind, Plugin, Shell, Tree, backend_name, fabrics, target_name, tpgs};
use crate::tree::NodeId;
use crate::world::{Medium, World};

/// Result of converting a configuration to a tree.
#[derive(Clone, Debug)]
pub struct Import {
    /// Tree that shows this configuration.
    pub tree: Tree,
    /// Parts of the configuration that are not shown in the tree.
    pub rest: Rest,
    /// Backends and targets that can't be shown, and the reason.
    pub hidden: Vec<String>,
}

/// Creates a tree for a configuration, showing all parts that are supported by LIO. `lock_secret`
/// is used for [`Rest`].
#[must_use]
pub fn import(document: &Value, lock_secret: String, world: &dyn World) -> Import {
    let rest = Rest {
        lock_secret,
        ..Rest::default()
    };
    update(Tree::new(), rest, [&Value::Null, document], world)
}

/// Updates a tree from the first configuration to the second. Both must use the daemon's own
/// format. Anything that is equal in both configurations, or in neither of them, is not changed.
#[must_use]
pub fn update(tree: Tree, mut rest: Rest, [old, new]: [&Value; 2], world: &dyn World) -> Import {
    let change = Change::between(old, new);
    let mut hidden = Vec::new();
    let config = Config::parse(&new.to_string(), "running");
    let config = config.map_err(|mistake| hidden.push(mistake.to_string()));
    // If a part did not change, we should keep it, because the tree and the rest contain data that
    // is not in the configuration, such as devices that are not used.
    rest.base = new.as_object().cloned().unwrap_or_default();
    for part in ["backends", "targets", "discovery_chap"] {
        rest.base.shift_remove(part);
    }
    let is_changed = |name: &str| change.backends.contains(name);
    rest.backends = rest
        .backends
        .into_iter()
        .filter(|(name, _)| !is_changed(name))
        .collect();
    rest.targets
        .retain(|doc| !change.targets.contains(name_of(doc)));
    let mut importer = Importer {
        tree,
        rest,
        hidden,
        config: config.ok(),
        world,
    };
    importer.clear(&change);
    // Create backends first, because they are needed to link the LUNs of targets.
    for (name, doc) in new["backends"].as_object().into_iter().flatten() {
        if change.backends.contains(name) {
            importer.backend(name, doc);
        }
    }
    for doc in new["targets"].as_array().into_iter().flatten() {
        if change.targets.contains(name_of(doc)) {
            importer.target(doc);
        }
    }
    if change.discovery {
        importer.discovery(new.get("discovery_chap").cloned());
    }
    Import {
        tree: importer.tree,
        rest: importer.rest,
        hidden: importer.hidden,
    }
}

fn name_of(target: &Value) -> &str {
    target["name"].as_str().unwrap_or_default()
}

/// Differences between two configurations: the names of all parts that were added, removed or
/// changed.
#[derive(Debug)]
struct Change {
    backends: BTreeSet<String>,
    targets: BTreeSet<String>,
    discovery: bool,
}

impl Change {
    fn between(old: &Value, new: &Value) -> Self {
        let backends = |document: &Value| -> BTreeMap<String, Value> {
            let all = document["backends"].as_object().into_iter().flatten();
            all.map(|(name, doc)| (name.clone(), doc.clone())).collect()
        };
        let targets = |document: &Value| -> BTreeMap<String, Value> {
            let all = document["targets"].as_array().into_iter().flatten();
            all.map(|doc| (name_of(doc).to_owned(), doc.clone()))
                .collect()
        };
        let backends = differing(&backends(old), &backends(new));
        let mut changed = differing(&targets(old), &targets(new));
        // If a backend was replaced, all targets that are using it must be treated as changed.
        for doc in new["targets"].as_array().into_iter().flatten() {
            let luns = doc["luns"].as_object().into_iter().flatten();
            let mut used = luns.filter_map(|(_, lun)| lun.as_str().or(lun["backend"].as_str()));
            if used.any(|name| backends.contains(name)) {
                changed.insert(name_of(doc).to_owned());
            }
        }
        Self {
            backends,
            targets: changed,
            discovery: old.get("discovery_chap") != new.get("discovery_chap"),
        }
    }
}

fn differing(old: &BTreeMap<String, Value>, new: &BTreeMap<String, Value>) -> BTreeSet<String> {
    let names = old.keys().chain(new.keys());
    names
        .filter(|name| old.get(*name) != new.get(*name))
        .cloned()
        .collect()
}

struct Importer<'a> {
    tree: Tree,
    rest: Rest,
    hidden: Vec<String>,
    config: Option<Config>,
    world: &'a dyn World,
}

/// Returns the directory to use for a device, and if this is already set in its name.
fn place(tree: &Tree, name: &str, plugin: Plugin) -> (String, String, bool) {
    if let Some((host, device)) = name.split_once(':')
        && Plugin::of_host(host) == Some(plugin)
        && tree.find(&format!("target/core/{host}")).is_none()
    {
        return (host.to_owned(), device.to_owned(), true);
    }
    let core = tree.find("target/core").expect("it is always there");
    let is_taken = |index: &u32| {
        let end = format!("_{index}");
        tree.subdirs(core).any(|(host, _)| host.ends_with(&end))
    };
    let index = (0..).find(|i| !is_taken(i)).expect("there are few hosts");
    (format!("{}_{index}", plugin.name()), name.to_owned(), false)
}

impl Importer<'_> {
    /// Removes everything that has changed from the tree.
    fn clear(&mut self, change: &Change) {
        let tree = &mut self.tree;
        for (_, fabric) in fabrics(tree) {
            let tpgs: Vec<_> = tpgs(tree, fabric)
                .into_iter()
                .map(|(_, _, id)| id)
                .collect();
            let is_shown = |tpg: &NodeId| {
                tree.value(*tpg, "enable") == "1"
                    && change.targets.contains(&target_name(tree, *tpg))
            };
            let changed: Vec<_> = tpgs.into_iter().filter(is_shown).collect();
            for tpg in changed {
                let wwn = tree.parent(tpg);
                tree.prune(tpg);
                tree.prune_if_empty(wwn);
            }
        }
        // Remove portal groups first, because removing a linked device would also remove its LUNs.
        // If a device is not enabled, it was never part of the daemon's configuration, so we need
        // to keep it.
        for (device, _) in device::devices(tree) {
            let is_shown = device::is_configured(tree, device);
            if is_shown && change.backends.contains(&backend_name(tree, device)) {
                let host = tree.parent(device);
                tree.prune(device);
                tree.prune_if_empty(host);
            }
        }
        if change.discovery {
            self.rest.discovery = None;
            if let Some(auth) = tree.find("target/iscsi/discovery_auth") {
                tree.dir_mut(auth).clear_values();
            }
        }
    }

    fn backend(&mut self, name: &str, doc: &Value) {
        let shown = doc.as_object().ok_or_else(|| "no mapping".to_owned());
        let shown = shown.and_then(|doc| self.show_backend(name, doc));
        match shown {
            Ok(tree) => self.tree = tree,
            Err(why) => {
                self.hidden.push(format!("backend {name}: {why}"));
                self.rest.backends.insert(name.to_owned(), doc.clone());
            }
        }
    }

    fn show_backend(&self, name: &str, doc: &Map<String, Value>) -> Result<Tree, String> {
        let text = |key: &str| doc.get(key).and_then(Value::as_str).unwrap_or_default();
        let backends = self.config.iter().flat_map(|c| &c.backends);
        let known = backends.into_iter().find(|b| b.name == name);
        let known = known.ok_or("the configuration is invalid")?;
        let (plugin, control) = match &known.spec.source {
            riser_config::Source::File { size, .. } => {
                let size = match (size, self.world.medium(text("path"))) {
                    (Some(size), _) => *size,
                    (None, Medium::File { size }) => size,
                    _ => return Err("its size is unknown".to_owned()),
                };
                let path = text("path");
                let control = format!("{}={path},{}={size}", option::FILE, option::SIZE);
                (Plugin::Fileio, control)
            }
            riser_config::Source::Device { .. } => {
                let read_only = u8::from(known.spec.read_only);
                let path = text("path");
                (
                    Plugin::Iblock,
                    format!("udev_path={path},readonly={read_only}"),
                )
            }
            riser_config::Source::Ram { size } | riser_config::Source::Null { size } => {
                if size % PAGE != 0 {
                    return Err("its size is not a multiple of the page size".to_owned());
                }
                let null = u8::from(text("kind") == "null");
                let control = format!("rd_pages={},rd_nullio={null}", size / PAGE);
                (Plugin::RamDisk, control)
            }
        };
        // `control` uses commas between options, and they can't be quoted.
        if control.matches(',').count() != 1 {
            return Err("its path contains a comma".to_owned());
        }
        let mut tree = self.tree.clone();
        let (host, device, is_named) = place(&tree, name, plugin);
        let path = format!("core/{host}/{device}");
        let errno = |errno: Errno| format!("{errno} at {path}");
        let mut shell = Shell {
            tree: &mut tree,
            world: self.world,
        };
        shell.mkdir(&format!("core/{host}")).map_err(errno)?;
        let id = shell.mkdir(&path).map_err(errno)?;
        shell
            .write(&format!("{path}/control"), &control)
            .map_err(errno)?;
        let udev_path = text("path");
        if !udev_path.is_empty() {
            let file = format!("{path}/udev_path");
            shell.write(&file, udev_path).map_err(errno)?;
        }
        shell.write(&format!("{path}/enable"), "1").map_err(errno)?;
        if !is_named {
            tree.set(id, origin::NAME, name);
        }
        self.fill(&mut tree, id, known);
        let mut omitted = Vec::new();
        let seen = backend::plain(&tree, id, plugin, self.world, &mut omitted);
        if let Some(omission) = omitted.into_iter().next() {
            return Err(omission.reason);
        }
        let seen = seen.expect("nothing was omitted");
        tree.set(id, origin::SEEN, Value::Object(seen).to_string());
        tree.set(id, origin::ORIGINAL, Value::Object(doc.clone()).to_string());
        Ok(tree)
    }

    /// Sets the attributes and names of a device to the values used by the daemon.
    fn fill(&self, tree: &mut Tree, device: NodeId, known: &riser_config::Backend) {
        let bit = |on: bool| if on { "1" } else { "0" };
        let attrib = tree.child(device, "attrib").expect("it comes with it");
        let wwn = tree.child(device, "wwn").expect("it comes with it");
        tree.set(attrib, "block_size", known.spec.block_size.to_string());
        if tree.dir(device).kind != Kind::Device(Plugin::Iblock) {
            tree.set(attrib, "emulate_write_cache", bit(known.spec.write_cache));
        }
        tree.set(attrib, "emulate_tpu", bit(known.thin));
        if let Some(rotational) = known.rotational {
            tree.set(attrib, "is_nonrot", bit(!rotational));
        }
        let host = self.config.as_ref().map(HostId::of);
        let identity = known.identity(&host.unwrap_or_else(|| HostId::new("")));
        let is_alias =
            identity.product == tree.dir(device).name.chars().take(15).collect::<String>();
        tree.set(attrib, "emulate_model_alias", bit(is_alias));
        tree.set(wwn, "vendor_id", identity.vendor);
        tree.set(wwn, "product_id", identity.product);
        tree.set(wwn, "revision", identity.revision);
        tree.set(wwn, "vpd_unit_serial", identity.serial);
    }

    fn target(&mut self, doc: &Value) {
        let name = name_of(doc).to_owned();
        let targets = self.config.iter().flat_map(|c| &c.targets);
        let known = targets.into_iter().find(|t| t.name == name);
        let shown = match known {
            Some(known) => {
                let show = Show {
                    world: self.world,
                    config: self.config.as_ref().expect("the target is its"),
                    target: known,
                };
                show_target(&self.tree, &show).and_then(|(mut tree, fabric, tpg)| {
                    self.seal(&mut tree, fabric, tpg, doc)?;
                    Ok(tree)
                })
            }
            None => Err("the configuration is invalid".to_owned()),
        };
        match shown {
            Ok(tree) => self.tree = tree,
            Err(why) => {
                self.hidden.push(format!("target {name}: {why}"));
                self.rest.targets.push(doc.clone());
            }
        }
    }

    /// Checks that exporting the target from this tree returns the same meaning as the document,
    /// and stores both.
    fn seal(
        &self,
        tree: &mut Tree,
        fabric: Fabric,
        tpg: NodeId,
        doc: &Value,
    ) -> Result<(), String> {
        let name = name_of(doc);
        if target_name(tree, tpg) != name {
            tree.set(tpg, origin::NAME, name);
        }
        // We need to export this now: a target can only be shown if its meaning doesn't change,
        // because the next change will send the exported target to the daemon.
        let mut omitted = Vec::new();
        let group = Group {
            tree,
            tpg,
            fabric,
            has_backend: &|_| true,
        };
        let seen = super::target::plain(&group, self.world, &mut omitted);
        if let Some(omission) = omitted.into_iter().next() {
            return Err(omission.reason);
        }
        let seen = Value::Object(seen.ok_or("the tree does not serve it")?);
        if self.meaning(doc) != self.meaning(&seen) {
            return Err(
                "LIO cannot represent its portals, units and access rules exactly".to_owned(),
            );
        }
        tree.set(tpg, origin::SEEN, seen.to_string());
        tree.set(tpg, origin::ORIGINAL, doc.to_string());
        Ok(())
    }

    /// Returns a target with only the settings that are visible to initiators, or `None` if it's
    /// not valid.
    fn meaning(&self, target: &Value) -> Option<String> {
        let named = self.config.iter().flat_map(|c| &c.backends);
        let named = named.map(|b| {
            (
                b.name.clone(),
                serde_json::json!({"kind": "null", "size": 4096}),
            )
        });
        let document = serde_json::json!({
            "backends": Map::from_iter(named),
            "targets": [target],
        });
        let config = Config::parse(&document.to_string(), "target").ok()?;
        let target = &config.targets[0];
        let mut portals: Vec<String> = target
            .portals
            .iter()
            .map(|p| format!("{} {}", p.protocol, p.listen))
            .collect();
        // Directories have no order, so we must ignore the order when we compare them.
        portals.sort();
        let seen = |rule: Option<&Rule>| {
            let seen = target.seen_by(rule.and_then(|rule| rule.luns.as_ref()));
            let seen = seen.into_iter();
            let unit = |(number, lun): (u16, SeenLun)| (number, lun.number, lun.read_only);
            seen.map(unit).collect::<Vec<_>>()
        };
        let access = match &target.access {
            Access::Open => format!("open {:?} {:?}", seen(None), secrets(target.chap.as_ref())),
            Access::Rules(rules) => {
                let mut rules: Vec<String> = rules
                    .iter()
                    .map(|rule| {
                        let seen = seen(Some(rule));
                        let mut rule = rule.clone();
                        // We compare the LUNs seen by the initiator, instead of the format used for
                        // them.
                        rule.luns = None;
                        let chap = rule.chap.take().or_else(|| target.chap.clone());
                        format!("{rule:?} {seen:?} {:?}", secrets(chap.as_ref()))
                    })
                    .collect();
                rules.sort();
                rules.join("\n")
            }
        };
        // Write protection is compared for each initiator.
        let luns = target.luns.iter();
        let luns: Vec<_> = luns.map(|(number, lun)| (number, lun.backend)).collect();
        let what = (&luns, &target.iqn);
        Some(format!("{portals:?} {what:?} {access}"))
    }

    fn discovery(&mut self, doc: Option<Value>) {
        let Some(doc) = doc else {
            return;
        };
        // Use a copy, so that if the target can't be shown, no part of it is left in the tree.
        let mut tree = self.tree.clone();
        let shown = show_discovery(&mut tree, self.world, &doc);
        let mut omitted = Vec::new();
        let seen = export::discovery(&tree, &self.rest, &mut omitted);
        if shown.is_ok() && seen.as_ref() == Some(&doc) {
            self.tree = tree;
        } else {
            self.hidden
                .push("discovery_chap: LIO has one user".to_owned());
            self.rest.discovery = Some(doc);
        }
    }
}

/// Returns the names and secrets for initiators, and our own. We can compare the secrets as text
/// because both documents contain them inline.
fn secrets(chap: Option<&Chap>) -> Option<Vec<String>> {
    let chap = chap?;
    let user = |u: &ChapUser| format!("{} {:?}", u.name, u.credentials().map(|c| c.secret).ok());
    let mutual = chap.mutual.iter().map(|own| format!("we: {}", user(own)));
    Some(chap.users.iter().map(user).chain(mutual).collect())
}
