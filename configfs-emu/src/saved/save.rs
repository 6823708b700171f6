//! Converts a tree to the file.

use serde_json::{Map, Value, json};

use super::{AUTH, PORT_GROUP, plugin_name, wwn_of};
use crate::rules::device::{self, PAGE, option};
use crate::rules::{Fabric, Kind, Plugin, Tree, fabrics, lun_number, tpgs};
use crate::tree::{Access, Kind as _, NodeId};
use crate::world::{Medium, World};

/// Result of converting a tree to the file.
#[derive(Clone, Debug, PartialEq)]
pub struct SaveFile {
    /// Content of the file.
    pub document: Value,
    /// Parts of the tree that are not supported in the file.
    pub omitted: Vec<String>,
}

/// Creates the file for a tree.
#[must_use]
pub fn save(tree: &Tree, world: &dyn World) -> SaveFile {
    let mut saver = Saver {
        tree,
        world,
        omitted: Vec::new(),
    };
    let devices = device::devices(tree).into_iter();
    let devices = devices.filter(|(device, _)| device::is_configured(tree, *device));
    let objects: Vec<Value> = devices
        .map(|(device, plugin)| saver.storage_object(device, plugin))
        .collect();
    let mut targets = Vec::new();
    for (fabric, dir) in fabrics(tree) {
        let wwns = tree.subdirs(dir);
        for (name, wwn) in wwns.filter(|(_, id)| tree.dir(*id).kind == Kind::Wwpn(fabric)) {
            targets.extend(saver.target(fabric, dir, name, wwn));
        }
    }
    let document = json!({
        "storage_objects": objects,
        "fabric_modules": saver.discovery(),
        "targets": targets,
    });
    SaveFile {
        document,
        omitted: saver.omitted,
    }
}

struct Saver<'a> {
    tree: &'a Tree,
    world: &'a dyn World,
    omitted: Vec<String>,
}

/// Returns a JSON number if the text is a number.
fn number(text: &str) -> Value {
    text.parse::<i64>()
        .map_or_else(|_| json!(text), Value::from)
}

impl Saver<'_> {
    fn child(&self, id: NodeId, name: &str) -> NodeId {
        self.tree.child(id, name).expect("it comes with it")
    }

    /// Returns all attributes that are both readable and writable.
    fn attributes(&self, id: NodeId, value: impl Fn(&str) -> Value) -> Map<String, Value> {
        let attrs = self.tree.dir(id).kind.attrs().iter();
        let attrs = attrs.filter(|attr| attr.access == Access::ReadWrite);
        attrs
            .map(|attr| (attr.name.to_owned(), value(self.tree.value(id, attr.name))))
            .collect()
    }

    fn storage_object(&mut self, device: NodeId, plugin: Plugin) -> Value {
        let tree = self.tree;
        let (attrib, wwn) = (self.child(device, "attrib"), self.child(device, "wwn"));
        let hidden = |name| tree.hidden(device, name);
        let is_set = |name| hidden(name) == Some("1");
        let bytes = |name| hidden(name).and_then(|text| text.parse::<u64>().ok());
        let mut object = json!({
            "name": tree.dir(device).name,
            "plugin": plugin_name(plugin),
            "attributes": self.attributes(attrib, number),
            "alua_tpgs": self.port_groups(device),
            "wwn": tree.value(wwn, "vpd_unit_serial"),
        });
        let is_cached = tree.value(attrib, "emulate_write_cache") == "1";
        match plugin {
            // The size of a block device can't be changed via `control`.
            Plugin::Fileio => {
                let path = hidden(option::FILE).unwrap_or_default();
                let size = match self.world.medium(path) {
                    Medium::Device(device) => Some(device.size),
                    _ => bytes(option::SIZE),
                };
                object["dev"] = json!(path);
                object["size"] = json!(size.unwrap_or(0));
                object["write_back"] = json!(is_cached);
                object["aio"] = json!(is_set(option::ASYNC));
            }
            Plugin::Iblock => {
                object["dev"] = json!(hidden(option::DEVICE).unwrap_or_default());
                object["readonly"] = json!(is_set(option::READ_ONLY));
                object["write_back"] = json!(is_cached);
            }
            Plugin::RamDisk => {
                object["size"] = json!(bytes(option::PAGES).unwrap_or(0) * PAGE);
                if is_set(option::NULL) {
                    object["nullio"] = json!(true);
                }
            }
        }
        self.check_names(device, wwn, plugin);
        object
    }

    /// The device identifier is only based on the serial number of the unit.
    fn check_names(&mut self, device: NodeId, wwn: NodeId, plugin: Plugin) {
        let attrib = self.child(device, "attrib");
        let product = match self.tree.value(attrib, "emulate_model_alias") {
            "1" => self.tree.dir(device).name.chars().take(15).collect(),
            _ => plugin.product().to_owned(),
        };
        let company = crate::rules::COMPANY;
        for (file, expected) in [
            ("vendor_id", "LIO-ORG"),
            ("product_id", product.as_str()),
            ("revision", "4.0"),
            ("company_id", company),
        ] {
            let value = self.tree.value(wwn, file);
            if value != expected {
                let path = self.tree.path(wwn);
                self.omitted.push(format!("{path}/{file}: {value}"));
            }
        }
    }

    fn port_groups(&self, device: NodeId) -> Vec<Value> {
        let groups = self.tree.subdirs(self.child(device, "alua"));
        let group = |(name, id): (&str, NodeId)| {
            let is_default = self.tree.dir(id).is_default;
            let own = self.tree.value(id, "tg_pt_gp_id");
            let mut group = json!({
                "name": name,
                "tg_pt_gp_id": if is_default { json!(0) } else { number(own) },
            });
            let kind = self.tree.dir(id).kind;
            for attr in kind.attrs().iter().filter(|a| PORT_GROUP.contains(&a.name)) {
                let value = self.tree.value(id, attr.name);
                let words = crate::rules::alua_words(attr.name);
                let place = words.iter().position(|word| *word == value);
                group[attr.name] = place.map_or_else(|| number(value), |place| json!(place));
            }
            group
        };
        groups.map(group).collect()
    }

    fn discovery(&self) -> Vec<Value> {
        let auth = self.tree.find("target/iscsi/discovery_auth");
        let auth = auth.filter(|auth| self.tree.value(*auth, "enforce_discovery_auth") == "1");
        let Some(auth) = auth else {
            return Vec::new();
        };
        let mut module = json!({ "name": "iscsi", "discovery_enable_auth": true });
        self.login("discovery_", auth, &mut module);
        vec![module]
    }

    fn login(&self, prefix: &str, auth: NodeId, into: &mut Value) {
        for (key, attr) in AUTH {
            let value = self.tree.value(auth, attr);
            if !value.is_empty() && value != "NULL" {
                into[format!("{prefix}{key}")] = json!(value);
            }
        }
    }

    fn target(&mut self, fabric: Fabric, dir: NodeId, name: &str, wwn: NodeId) -> Option<Value> {
        let Some(written) = wwn_of(fabric, name) else {
            self.omitted.push(self.tree.path(wwn));
            return None;
        };
        let own = tpgs(self.tree, dir).into_iter();
        let own = own.filter(|(_, _, tpg)| self.tree.parent(*tpg) == wwn);
        let groups: Vec<(String, NodeId)> =
            own.map(|(_, name, tpg)| (name.to_owned(), tpg)).collect();
        let groups: Vec<Value> = groups
            .iter()
            .map(|(name, tpg)| self.group(fabric, name, *tpg))
            .collect();
        let mut target = json!({ "fabric": fabric.name(), "wwn": written, "tpgs": groups });
        let parameters = self.attributes(self.child(wwn, "param"), |text| json!(text));
        if !parameters.is_empty() {
            target["parameters"] = Value::Object(parameters);
        }
        Some(target)
    }

    fn group(&mut self, fabric: Fabric, name: &str, tpg: NodeId) -> Value {
        let tree = self.tree;
        let tag = name.strip_prefix("tpgt_").unwrap_or("1");
        let acls: Vec<(&str, NodeId)> = tree.subdirs(self.child(tpg, "acls")).collect();
        let mut node_acls = Vec::new();
        for (name, acl) in acls {
            node_acls.extend(self.acl(fabric, name, acl));
        }
        let mut group = json!({
            "tag": number(tag),
            "enable": tree.value(tpg, "enable") == "1",
            "attributes": self.attributes(self.child(tpg, "attrib"), number),
            "luns": self.luns(tpg),
            "node_acls": node_acls,
            "portals": self.portals(tpg),
        });
        let parameters = self.attributes(self.child(tpg, "param"), |text| json!(text));
        if !parameters.is_empty() {
            group["parameters"] = Value::Object(parameters);
        }
        if fabric == Fabric::Iscsi {
            self.login("chap_", self.child(tpg, "auth"), &mut group);
        }
        group
    }

    fn portals(&self, tpg: NodeId) -> Vec<Value> {
        let portals = self.tree.subdirs(self.child(tpg, "np"));
        let portal = |(name, id): (&str, NodeId)| {
            let (address, port) = name.rsplit_once(':')?;
            Some(json!({
                "ip_address": address,
                "port": number(port),
                "iser": self.tree.value(id, "iser") == "1",
                "offload": false,
            }))
        };
        portals.filter_map(portal).collect()
    }

    fn luns(&self, tpg: NodeId) -> Vec<Value> {
        let luns = self.tree.subdirs(self.child(tpg, "lun"));
        let lun = |(name, id): (&str, NodeId)| {
            let (alias, device) = self.tree.links(id).next()?;
            let Kind::Device(plugin) = self.tree.dir(device).kind else {
                return None;
            };
            let group = self.tree.value(id, "alua_tg_pt_gp");
            Some(json!({
                "index": lun_number(name).ok()?,
                "alias": alias,
                "storage_object":
                    format!("/backstores/{}/{}", plugin_name(plugin), self.tree.dir(device).name),
                "alua_tg_pt_gp_name": group,
            }))
        };
        luns.filter_map(lun).collect()
    }

    fn acl(&mut self, fabric: Fabric, name: &str, acl: NodeId) -> Option<Value> {
        let Some(wwn) = wwn_of(fabric, name) else {
            self.omitted.push(self.tree.path(acl));
            return None;
        };
        let mapped = |(name, id): (&str, NodeId)| {
            let (alias, lun) = self.tree.links(id).next()?;
            Some(json!({
                "index": lun_number(name).ok()?,
                "alias": alias,
                "tpg_lun": lun_number(&self.tree.dir(lun).name).ok()?,
                "write_protect": self.tree.value(id, "write_protect") == "1",
            }))
        };
        let dirs = self.tree.subdirs(acl);
        let dirs = dirs.filter(|(_, id)| self.tree.dir(*id).kind == Kind::MappedLun);
        let mut entry = json!({
            "node_wwn": wwn,
            "mapped_luns": dirs.filter_map(mapped).collect::<Vec<_>>(),
        });
        let attributes = self.attributes(self.child(acl, "attrib"), number);
        // Don't add a key without any values.
        if !attributes.is_empty() {
            entry["attributes"] = Value::Object(attributes);
        }
        if fabric == Fabric::Iscsi {
            let tag = self.tree.value(acl, "tag").trim_end();
            if !tag.is_empty() {
                entry["tag"] = json!(tag);
            }
            self.login("chap_", self.child(acl, "auth"), &mut entry);
        }
        Some(entry)
    }
}
