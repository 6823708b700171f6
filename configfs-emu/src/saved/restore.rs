//! From the file to a tree, and to a configuration.

use riser_config::Config;
use rustix::io::Errno;
use serde_json::Value;

use super::{AUTH, PORT_GROUP, name_of};
use crate::convert::{self, Rest};
use crate::rules::{Fabric, Plugin, Shell, Tree};
use crate::world::World;

/// The tree of a saved file, and the losses.
#[derive(Clone, Debug)]
pub struct Restoration {
    /// The tree that the file describes.
    pub tree: Tree,
    /// Parts of the file that could not be done, and why.
    pub lost: Vec<String>,
}

/// Does to an empty tree what a file says.
#[must_use]
pub fn restore(file: &Value, world: &dyn World) -> Restoration {
    let mut tree = Tree::new();
    let mut restorer = Restorer {
        shell: Shell {
            tree: &mut tree,
            world,
        },
        lost: Vec::new(),
    };
    for (n, object) in items(file, "storage_objects").enumerate() {
        restorer.storage_object(n, object);
    }
    for module in items(file, "fabric_modules") {
        restorer.fabric_module(module);
    }
    for target in items(file, "targets") {
        restorer.target(target);
    }
    let lost = restorer.lost;
    Restoration { tree, lost }
}

/// The configuration that a restored tree says; what it cannot is left out, and named in `lost`.
#[must_use]
pub fn configuration(
    mut restored: Restoration,
    lock_secret: &str,
    world: &dyn World,
) -> (Config, Vec<String>) {
    let rest = Rest {
        lock_secret: lock_secret.to_owned(),
        ..Rest::default()
    };
    // Each round takes away what cannot be done and notes it, so a file with mistakes still gives
    // all the rest. A tree and a document only shrink, so both loops end.
    let mut document = loop {
        match convert::export(&restored.tree, &rest, world) {
            Ok(exported) => {
                restored.lost.extend(exported.notes);
                break exported.document;
            }
            Err(error) => {
                let id = restored.tree.find(&error.path);
                restored.lost.push(error.to_string());
                restored.tree.prune(id.expect("a directory of this tree"));
            }
        }
    };
    loop {
        let mistake = match Config::parse(&document.to_string(), "saveconfig") {
            Ok(config) => return (config, restored.lost),
            Err(mistake) => mistake,
        };
        let what = remove(&mut document, &mistake.path);
        restored.lost.push(format!("{what}: {}", mistake.message));
    }
}

/// Takes out of a document the target that a place belongs to, else all that is served. Gives the
/// place with the target's name.
fn remove(document: &mut Value, place: &str) -> String {
    let index = place
        .strip_prefix("targets[")
        .and_then(|rest| rest.split_once(']'));
    let index = index.and_then(|(index, rest)| Some((index.parse::<usize>().ok()?, rest)));
    let targets = document["targets"].as_array_mut();
    match (index, targets) {
        (Some((index, rest)), Some(targets)) if index < targets.len() => {
            let target = targets.remove(index);
            format!("target {}{rest}", text(&target, "name"))
        }
        // Who would have to prove himself to find targets must not do without.
        _ => {
            *document = serde_json::json!({ "targets": [] });
            place.to_owned()
        }
    }
}

fn items<'a>(value: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    value[key].as_array().into_iter().flatten()
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

/// A value as it is written to a file.
fn written(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Bool(on) => u8::from(*on).to_string(),
        other => other.to_string(),
    }
}

struct Restorer<'a> {
    shell: Shell<'a>,
    lost: Vec<String>,
}

impl Restorer<'_> {
    fn lose(&mut self, what: &str, why: impl std::fmt::Display) {
        self.lost.push(format!("{what}: {why}"));
    }

    /// Returns true if something was done that may not be.
    fn done(&mut self, what: &str, result: Result<(), Errno>) -> bool {
        if let Err(errno) = result {
            self.lose(what, errno);
        }
        result.is_ok()
    }

    fn mkdir(&mut self, path: &str) -> bool {
        let result = match self.shell.mkdir(path) {
            Ok(_) | Err(Errno::EXIST) => Ok(()),
            Err(errno) => Err(errno),
        };
        self.done(path, result)
    }

    /// Writes a value that is not there yet.
    fn write(&mut self, path: &str, value: &str) -> bool {
        let there = self.shell.read(path);
        if there.is_ok_and(|there| there.strip_suffix('\n').unwrap_or(&there) == value) {
            return true;
        }
        let result = self.shell.write(path, value);
        self.done(&format!("{path} = {value}"), result)
    }

    fn link(&mut self, path: &str, target: &str) -> bool {
        let result = self.shell.link(path, &format!("/target/{target}"));
        self.done(path, result)
    }

    /// Writes a mapping of files and values.
    fn write_all(&mut self, dir: &str, values: &Value) {
        for (name, value) in values.as_object().into_iter().flatten() {
            self.write(&format!("{dir}/{name}"), &written(value));
        }
    }

    fn login(&mut self, dir: &str, prefix: &str, from: &Value) {
        for (key, attr) in AUTH {
            if let Some(value) = from[format!("{prefix}{key}")].as_str() {
                self.write(&format!("{dir}/{attr}"), value);
            }
        }
    }

    fn storage_object(&mut self, n: usize, object: &Value) {
        let name = text(object, "name");
        let (plugin, dev) = (text(object, "plugin"), text(object, "dev"));
        let size = object["size"].as_u64().unwrap_or(0);
        let is_set = |key: &str| object[key].as_bool().unwrap_or(false);
        let mut control = match plugin {
            "fileio" => format!("fd_dev_name={dev},fd_dev_size={size}"),
            "block" => format!("udev_path={dev}"),
            "ramdisk" => format!("rd_pages={}", size / crate::rules::device::PAGE),
            other => {
                let why = format!("riserd has no backstore `{other}`");
                return self.lose(&format!("storage object {name}"), why);
            }
        };
        for (wanted, option) in [
            (
                plugin == "fileio" && is_set("write_back"),
                "fd_buffered_io=1",
            ),
            (plugin == "fileio" && is_set("aio"), "fd_async_io=1"),
            (plugin == "block" && is_set("readonly"), "readonly=1"),
            (plugin == "ramdisk" && is_set("nullio"), "rd_nullio=1"),
        ] {
            if wanted {
                control = format!("{control},{option}");
            }
        }
        let host = match plugin {
            "fileio" => Plugin::Fileio,
            "block" => Plugin::Iblock,
            _ => Plugin::RamDisk,
        };
        let host = format!("core/{}_{n}", host.name());
        let path = format!("{host}/{name}");
        let serial = text(object, "wwn");
        let is_made = self.mkdir(&host)
            && self.mkdir(&path)
            && self.write_control(&path, &control)
            && (dev.is_empty() || self.write(&format!("{path}/udev_path"), dev))
            && (serial.is_empty() || self.write(&format!("{path}/wwn/vpd_unit_serial"), serial))
            && self.write(&format!("{path}/enable"), "1");
        // Enabling sets attributes from the medium, so those of the file come after it.
        if !is_made {
            return;
        }
        self.write_all(&format!("{path}/attrib"), &object["attributes"]);
        for group in items(object, "alua_tpgs") {
            self.port_group(&format!("{path}/alua/{}", text(group, "name")), group);
        }
    }

    fn write_control(&mut self, path: &str, control: &str) -> bool {
        let path = format!("{path}/control");
        let result = self.shell.write(&path, control);
        self.done(&path, result)
    }

    fn port_group(&mut self, path: &str, group: &Value) {
        if !self.mkdir(path) {
            return;
        }
        let number = written(&group["tg_pt_gp_id"]);
        self.write(&format!("{path}/tg_pt_gp_id"), &number);
        for name in PORT_GROUP {
            let Some(value) = group.get(name).filter(|value| !value.is_null()) else {
                continue;
            };
            let words = crate::rules::alua_words(name);
            let shown = value.as_u64().and_then(|n| words.get(n as usize));
            let file = format!("{path}/{name}");
            let there = self.shell.read(&file).unwrap_or_default();
            if shown.is_none_or(|shown| there.trim_end() != *shown) {
                self.write(&file, &written(value));
            }
        }
    }

    fn fabric_module(&mut self, module: &Value) {
        let name = text(module, "name");
        if name != "iscsi" {
            return self.lose(name, "only iSCSI has discovery with authentication");
        }
        let auth = "iscsi/discovery_auth";
        if self.mkdir("iscsi") {
            self.login(auth, "discovery_", module);
            let wanted = module["discovery_enable_auth"].as_bool().unwrap_or(false);
            self.write(
                &format!("{auth}/enforce_discovery_auth"),
                &u8::from(wanted).to_string(),
            );
        }
    }

    fn target(&mut self, target: &Value) {
        let wwn = text(target, "wwn");
        let fabric = match text(target, "fabric") {
            "iscsi" => Fabric::Iscsi,
            "srpt" => Fabric::Srpt,
            other => {
                let why = format!("riserd has no fabric `{other}`");
                return self.lose(&format!("target {wwn}"), why);
            }
        };
        let path = format!("{}/{}", fabric.name(), name_of(fabric, wwn));
        if !self.mkdir(fabric.name()) || !self.mkdir(&path) {
            return;
        }
        self.write_all(&format!("{path}/param"), &target["parameters"]);
        for group in items(target, "tpgs") {
            let tag = group["tag"].as_u64().unwrap_or(1);
            self.group(fabric, &format!("{path}/tpgt_{tag}"), group);
        }
    }

    fn group(&mut self, fabric: Fabric, path: &str, group: &Value) {
        if !self.mkdir(path) {
            return;
        }
        self.write_all(&format!("{path}/attrib"), &group["attributes"]);
        self.write_all(&format!("{path}/param"), &group["parameters"]);
        for lun in items(group, "luns") {
            self.lun(path, lun);
        }
        for portal in items(group, "portals") {
            let address = text(portal, "ip_address");
            let np = format!("{path}/np/{address}:{}", written(&portal["port"]));
            if self.mkdir(&np) {
                for (key, file) in [("iser", "iser"), ("offload", "cxgbit")] {
                    let is_on = portal[key].as_bool().unwrap_or(false);
                    self.write(&format!("{np}/{file}"), &u8::from(is_on).to_string());
                }
            }
        }
        for acl in items(group, "node_acls") {
            self.acl(fabric, path, acl);
        }
        self.login(&format!("{path}/auth"), "chap_", group);
        if group["enable"].as_bool().unwrap_or(true) {
            self.write(&format!("{path}/enable"), "1");
        }
    }

    fn lun(&mut self, tpg: &str, lun: &Value) {
        let path = format!("{tpg}/lun/lun_{}", written(&lun["index"]));
        let object = text(lun, "storage_object");
        let found = self.device(object);
        let Some(device) = found else {
            return self.lose(&path, format!("{object} is not there"));
        };
        if self.mkdir(&path) && self.link(&format!("{path}/{}", alias(lun)), &device) {
            let group = text(lun, "alua_tg_pt_gp_name");
            if !matches!(group, "" | "default_tg_pt_gp") {
                self.write(&format!("{path}/alua_tg_pt_gp"), group);
            }
        }
    }

    /// The path of a storage object that is written as `/backstores/PLUGIN/NAME`.
    fn device(&self, object: &str) -> Option<String> {
        let (plugin, name) = object.strip_prefix("/backstores/")?.split_once('/')?;
        let tree = &*self.shell.tree;
        let mut devices = crate::rules::device::devices(tree).into_iter();
        let (id, _) = devices
            .find(|(id, kind)| super::plugin_name(*kind) == plugin && tree.dir(*id).name == name)?;
        let path = tree.path(id);
        path.strip_prefix("target/").map(str::to_owned)
    }

    fn acl(&mut self, fabric: Fabric, tpg: &str, acl: &Value) {
        let name = name_of(fabric, text(acl, "node_wwn"));
        let path = format!("{tpg}/acls/{name}");
        if !self.mkdir(&path) {
            return;
        }
        self.write_all(&format!("{path}/attrib"), &acl["attributes"]);
        for mapped in items(acl, "mapped_luns") {
            let dir = format!("{path}/lun_{}", written(&mapped["index"]));
            let lun = format!("{tpg}/lun/lun_{}", written(&mapped["tpg_lun"]));
            if self.mkdir(&dir) && self.link(&format!("{dir}/{}", alias(mapped)), &lun) {
                let protect = mapped["write_protect"].as_bool().unwrap_or(false);
                self.write(
                    &format!("{dir}/write_protect"),
                    &u8::from(protect).to_string(),
                );
            }
        }
        if let Some(tag) = acl["tag"].as_str() {
            self.write(&format!("{path}/tag"), tag);
        }
        self.login(&format!("{path}/auth"), "chap_", acl);
    }
}

/// The name of a link.
fn alias(of: &Value) -> &str {
    match text(of, "alias") {
        "" => "restored",
        alias => alias,
    }
}
