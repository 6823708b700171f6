//! Converts the file to a tree, and to a configuration.

use riser_config::Config;
use rustix::io::Errno;
use serde_json::{Map, Value};

use super::{AUTH, PORT_GROUP, name_of};
use crate::convert::{self, Rest};
use crate::host;
use crate::rules::device::option;
use crate::rules::{Fabric, Plugin, Shell, Tree};
use crate::world::World;

use super::remove::remove;

/// Tree created from a saved file, and a list of missing parts.
#[derive(Clone, Debug)]
pub struct Restoration {
    /// Tree that is described by the file.
    pub tree: Tree,
    /// Parts of the file that would be served by LIO but are left out here, and the reason.
    pub lost: Vec<String>,
    /// Parts of the file that are also not served by LIO, and settings that have no effect.
    pub notes: Vec<String>,
}

/// Configuration created from a saved file, and a list of missing parts.
#[derive(Clone, Debug)]
pub struct Imported {
    /// The configuration.
    pub config: Config,
    /// See [`Restoration::lost`].
    pub lost: Vec<String>,
    /// See [`Restoration::notes`].
    pub notes: Vec<String>,
}

/// Creates a tree from a file.
#[must_use]
pub fn restore(file: &Value, world: &dyn World) -> Restoration {
    let mut tree = Tree::new();
    let mut restorer = Restorer {
        shell: Shell {
            tree: &mut tree,
            world,
        },
        lost: Vec::new(),
        notes: Vec::new(),
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
    let Restorer { lost, notes, .. } = restorer;
    Restoration { tree, lost, notes }
}

/// Converts a restored tree to a configuration, without the parts that are not supported.
#[must_use]
pub fn configuration(restored: Restoration, lock_secret: &str, world: &dyn World) -> Imported {
    let rest = Rest {
        lock_secret: lock_secret.to_owned(),
        ..Rest::default()
    };
    let Restoration {
        tree,
        mut lost,
        mut notes,
    } = restored;
    let exported = convert::export(&tree, &rest, world);
    lost.extend(exported.omitted.iter().map(ToString::to_string));
    notes.extend(exported.notes);
    let mut document = exported.document;
    // We remove one error per iteration. Because this always makes the document smaller, the loop
    // will terminate.
    loop {
        let mistake = match Config::parse(&document.to_string(), "saveconfig") {
            Ok(config) => {
                return Imported {
                    config,
                    lost,
                    notes,
                };
            }
            Err(mistake) => mistake,
        };
        let removed = remove(&mut document, &mistake.path, lock_secret);
        lost.push(format!("{removed}: {}", mistake.message));
    }
}

fn items<'a>(value: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    value[key].as_array().into_iter().flatten()
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

/// Returns a value as it should be written to a file in the tree.
fn written(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Bool(on) => u8::from(*on).to_string(),
        other => other.to_string(),
    }
}

/// Quotes a word for a shell, unless this is not required.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@%+=".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

/// Parses a flag, which can be a number or text if the file was edited. Returns `None` if it's
/// missing.
fn flag(value: &Value) -> Option<bool> {
    match value {
        Value::Null => None,
        value => Some(written(value) != "0"),
    }
}

/// Returns the reason why the tree has rejected an operation, to be shown to the user. `invalid` is
/// used for `EINVAL`.
fn reason(errno: Errno, invalid: &str) -> String {
    match errno {
        Errno::INVAL => invalid,
        Errno::NOENT => "does not exist",
        Errno::NOSYS | Errno::PERM | Errno::ACCESS => "unsupported by riserd",
        Errno::RANGE | Errno::OVERFLOW => "value out of range",
        Errno::NAMETOOLONG => "name too long",
        Errno::EXIST => "exists already",
        Errno::NOTBLK => "not a block device",
        Errno::ISDIR => "a directory, not a file or block device",
        Errno::NODEV => "unsupported by its disk",
        other => return format!("refused: {other}"),
    }
    .to_owned()
}

struct Restorer<'a> {
    shell: Shell<'a>,
    lost: Vec<String>,
    notes: Vec<String>,
}

impl Restorer<'_> {
    fn lose(&mut self, what: &str, why: impl std::fmt::Display) {
        self.lost.push(format!("{what}: {why}"));
    }

    fn note(&mut self, what: &str, why: impl std::fmt::Display) {
        self.notes.push(format!("{what}: {why}"));
    }

    /// Returns true if a required operation was successful.
    fn done(&mut self, what: &str, result: Result<(), Errno>, invalid: &str) -> bool {
        if let Err(errno) = result {
            self.lose(what, reason(errno, invalid));
        }
        result.is_ok()
    }

    /// Creates a directory if it doesn't exist.
    fn mkdir(&mut self, what: &str, path: &str, invalid: &str) -> bool {
        let result = match self.shell.mkdir(path) {
            Ok(_) | Err(Errno::EXIST) => Ok(()),
            Err(errno) => Err(errno),
        };
        self.done(what, result, invalid)
    }

    /// Writes a value, unless the file already contains it.
    fn write(&mut self, path: &str, value: &str) -> Result<(), Errno> {
        let current = self.shell.read(path);
        if current.is_ok_and(|text| text.strip_suffix('\n').unwrap_or(&text) == value) {
            return Ok(());
        }
        self.shell.write(path, value)
    }

    /// Writes a setting that doesn't affect access.
    fn set(&mut self, path: &str, value: &str) {
        let Err(errno) = self.write(path, value) else {
            return;
        };
        let (_, name) = path.rsplit_once('/').unwrap_or(("", path));
        if !convert::is_meaningless(name) {
            let reason = match errno {
                Errno::NOENT => "unknown setting".to_owned(),
                errno => reason(errno, "invalid value"),
            };
            self.note(&format!("{path} = {value}"), format!("{reason}; ignored"));
        }
    }

    fn link(&mut self, path: &str, target: &str) -> bool {
        let result = self.shell.link(path, &format!("/target/{target}"));
        self.done(path, result, "invalid link")
    }

    /// Writes all settings in a map.
    fn set_all(&mut self, dir: &str, values: &Value) {
        for (name, value) in values.as_object().into_iter().flatten() {
            self.set(&format!("{dir}/{name}"), &written(value));
        }
    }

    fn login(&mut self, dir: &str, prefix: &str, from: &Value) {
        for (key, attr) in AUTH {
            if let Some(value) = from[format!("{prefix}{key}")].as_str() {
                let result = self.write(&format!("{dir}/{attr}"), value);
                self.done(&format!("{dir}/{attr}"), result, "invalid name or secret");
            }
        }
    }

    fn storage_object(&mut self, n: usize, object: &Value) {
        let name = text(object, "name");
        let what = format!("storage object {name}");
        let (plugin, dev) = (text(object, "plugin"), text(object, "dev"));
        let size = object["size"].as_u64().unwrap_or(0);
        let is_set = |key: &str| flag(&object[key]).unwrap_or(false);
        let mut control = match plugin {
            "fileio" => format!("fd_dev_name={dev},fd_dev_size={size}"),
            "block" => format!("udev_path={dev}"),
            "ramdisk" => format!("rd_pages={}", size / crate::rules::device::PAGE),
            other => {
                let why = format!("unsupported backstore `{other}`: this disk is omitted");
                return self.lose(&what, why);
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
        let (host, path_option) = match plugin {
            "fileio" => (Plugin::Fileio, Some(option::FILE)),
            "block" => (Plugin::Iblock, Some(option::DEVICE)),
            _ => (Plugin::RamDisk, None),
        };
        let host = format!("core/{}_{n}", host.name());
        let path = format!("{host}/{name}");
        let serial = text(object, "wwn");
        if !self.mkdir(&what, &host, "invalid number") || !self.mkdir(&what, &path, "invalid name")
        {
            return;
        }
        let control = self.shell.write(&format!("{path}/control"), &control);
        if !self.done(&what, control, "invalid path or size") {
            return;
        }
        // `control` uses commas between options, and they can't be quoted in a path.
        if let Some(option) = path_option.filter(|_| dev.contains([',', '\n'])) {
            let device = self.shell.tree.find(&format!("target/{path}"));
            let device = device.expect("it was made");
            self.shell.tree.set(device, option, dev);
        }
        if !dev.is_empty() {
            self.set(&format!("{path}/udev_path"), dev);
        }
        if !serial.is_empty() {
            let result = self.write(&format!("{path}/wwn/vpd_unit_serial"), serial);
            self.done(
                &format!("{what}, its unit serial number"),
                result,
                "invalid",
            );
        }
        let enabled = self.write(&format!("{path}/enable"), "1");
        let (label, invalid) = match dev {
            "" => (what, "missing size"),
            dev => (format!("{what}: {dev}"), "missing path or size"),
        };
        if !self.done(&label, enabled, invalid) {
            return;
        }
        // The attributes must be written at the end, because some are set based on the medium when
        // the device is enabled.
        let mut attributes = object["attributes"].clone();
        if let Some(attributes) = attributes.as_object_mut().filter(|_| plugin == "block") {
            // For a block device, the cache mode is set by the device. Old kernels save 1 for all
            // devices.
            attributes.shift_remove("emulate_write_cache");
        }
        if let Some(attributes) = attributes.as_object_mut().filter(|_| plugin == "fileio") {
            self.protection(&path, dev, attributes);
        }
        self.set_all(&format!("{path}/attrib"), &attributes);
        for group in items(object, "alua_tpgs") {
            self.port_group(&format!("{path}/alua/{}", text(group, "name")), group);
        }
    }

    /// Removes the type of protection information from the attributes of a file, and notes the command
    /// that imports it. The image can also be served without it.
    fn protection(&mut self, path: &str, file: &str, attributes: &mut Map<String, Value>) {
        let number = attributes.get("pi_prot_type").map(written);
        let Some(number) = number.filter(|number| ["1", "3"].contains(&number.as_str())) else {
            return;
        };
        attributes.shift_remove("pi_prot_type");
        let block_size = attributes.get("block_size").map(written);
        let block_size = block_size.map_or(String::new(), |size| match size.as_str() {
            "512" => String::new(),
            size => format!(" --block-size {size}"),
        });
        let words = [file, &format!("{file}.protected")].map(quoted);
        self.note(
            &format!("{path}/attrib/pi_prot_type = {number}"),
            format!(
                "the image is served without its protection information; to keep both, stop LIO, run \
                 `riserd import-disk --type {number}{block_size} {} {}`, and set `path` to the new \
                 file and `protection: {{ type: {number} }}`",
                words[0], words[1]
            ),
        );
    }

    /// Creates a target port group. Note that its state has no effect.
    fn port_group(&mut self, path: &str, group: &Value) {
        if let Err(errno) = self.shell.mkdir(path)
            && errno != Errno::EXIST
        {
            return self.note(path, reason(errno, "invalid name"));
        }
        let number = written(&group["tg_pt_gp_id"]);
        self.set(&format!("{path}/tg_pt_gp_id"), &number);
        for name in PORT_GROUP {
            let Some(value) = group.get(name).filter(|value| !value.is_null()) else {
                continue;
            };
            let words = crate::rules::alua_words(name);
            let shown = value.as_u64().and_then(|n| words.get(n as usize));
            let file = format!("{path}/{name}");
            let there = self.shell.read(&file).unwrap_or_default();
            if shown.is_none_or(|shown| there.trim_end() != *shown) {
                self.set(&file, &written(value));
            }
        }
    }

    fn fabric_module(&mut self, module: &Value) {
        let name = text(module, "name");
        let is_enforced = flag(&module["discovery_enable_auth"]).unwrap_or(false);
        if name != "iscsi" {
            if is_enforced {
                self.lose(name, "only iSCSI has discovery with authentication");
            }
            return;
        }
        let auth = "iscsi/discovery_auth";
        if self.mkdir("iscsi", "iscsi", "invalid name") {
            self.login(auth, "discovery_", module);
            let file = format!("{auth}/enforce_discovery_auth");
            let result = self.write(&file, &u8::from(is_enforced).to_string());
            self.done(&file, result, "invalid value");
        }
    }

    fn target(&mut self, target: &Value) {
        let wwn = text(target, "wwn");
        let what = format!("target {wwn}");
        let fabric = match text(target, "fabric") {
            "iscsi" => Fabric::Iscsi,
            "srpt" => Fabric::Srpt,
            other => {
                let why = format!("unsupported fabric `{other}`: this target is omitted");
                return self.lose(&what, why);
            }
        };
        let name = name_of(fabric, wwn);
        let path = format!("{}/{name}", fabric.name());
        let invalid = match fabric {
            Fabric::Iscsi => "invalid name of an iSCSI target: this target is omitted",
            Fabric::Srpt => "invalid name of an SRP port: this target is omitted",
        };
        if !self.mkdir(&what, fabric.name(), invalid) || !self.mkdir(&what, &path, invalid) {
            return;
        }
        if fabric == Fabric::Srpt {
            self.name_placeholders(&what, &name);
        }
        self.set_all(&format!("{path}/param"), &target["parameters"]);
        for group in items(target, "tpgs") {
            let tag = group["tag"].as_u64().unwrap_or(1);
            self.group(fabric, &format!("{path}/tpgt_{tag}"), group);
        }
    }

    /// Reports the placeholder addresses of an unknown SRP port.
    fn name_placeholders(&mut self, what: &str, port: &str) {
        let addresses = self.shell.world.port_addresses(port);
        for address in addresses.into_iter().filter(host::is_placeholder) {
            let why = format!(
                "riserd serves SRP at an IP address, but LIO's file contains the GID of an \
                 InfiniBand port: replace {address} in its `portals` with the IP address of that \
                 port"
            );
            self.lose(what, why);
        }
    }

    fn group(&mut self, fabric: Fabric, path: &str, group: &Value) {
        if !self.mkdir(path, path, "invalid number of a portal group") {
            return;
        }
        self.set_all(&format!("{path}/attrib"), &group["attributes"]);
        self.set_all(&format!("{path}/param"), &group["parameters"]);
        for lun in items(group, "luns") {
            self.lun(path, lun);
        }
        for portal in items(group, "portals") {
            self.portal(path, portal);
        }
        for acl in items(group, "node_acls") {
            self.acl(fabric, path, group, acl);
        }
        self.login(&format!("{path}/auth"), "chap_", group);
        self.name_refused(path);
        let counts = format!(
            "its {} LUNs and {} ACLs are omitted",
            items(group, "luns").count(),
            items(group, "node_acls").count()
        );
        if !flag(&group["enable"]).unwrap_or(true) {
            return self.note(path, format!("disabled in the file; {counts}"));
        }
        if fabric == Fabric::Iscsi && items(group, "portals").next().is_none() {
            self.note(path, format!("no portal; {counts}"));
        }
        let result = self.write(&format!("{path}/enable"), "1");
        self.done(path, result, "cannot be enabled");
    }

    fn portal(&mut self, tpg: &str, portal: &Value) {
        let address = text(portal, "ip_address");
        let np = format!("{tpg}/np/{address}:{}", written(&portal["port"]));
        if !self.mkdir(
            &np,
            &np,
            "not an IP address and port, or already used by another portal",
        ) {
            return;
        }
        for (key, file) in [("iser", "iser"), ("offload", "cxgbit")] {
            let is_on = flag(&portal[key]).unwrap_or(false);
            self.set(&format!("{np}/{file}"), &u8::from(is_on).to_string());
        }
    }

    fn lun(&mut self, tpg: &str, lun: &Value) {
        let path = format!("{tpg}/lun/lun_{}", written(&lun["index"]));
        let object = text(lun, "storage_object");
        let Some(device) = self.device(object) else {
            return self.lose(&path, format!("{object} is omitted or missing"));
        };
        if self.mkdir(&path, &path, "invalid number of a LUN")
            && self.link(&format!("{path}/{}", alias(lun)), &device)
        {
            let group = text(lun, "alua_tg_pt_gp_name");
            if !matches!(group, "" | "default_tg_pt_gp") {
                self.set(&format!("{path}/alua_tg_pt_gp"), group);
            }
        }
    }

    /// Returns the path of a storage object in the format `/backstores/PLUGIN/NAME`.
    fn device(&self, object: &str) -> Option<String> {
        let (plugin, name) = object.strip_prefix("/backstores/")?.split_once('/')?;
        let tree = &*self.shell.tree;
        let mut devices = crate::rules::device::devices(tree).into_iter();
        let (id, _) = devices
            .find(|(id, kind)| super::plugin_name(*kind) == plugin && tree.dir(*id).name == name)?;
        let path = tree.path(id);
        path.strip_prefix("target/").map(str::to_owned)
    }

    fn acl(&mut self, fabric: Fabric, tpg: &str, group: &Value, acl: &Value) {
        let name = name_of(fabric, text(acl, "node_wwn"));
        let path = format!("{tpg}/acls/{name}");
        if !self.mkdir(&path, &path, "invalid name of an initiator") {
            return;
        }
        self.set_all(&format!("{path}/attrib"), &acl["attributes"]);
        for mapped in items(acl, "mapped_luns") {
            let dir = format!("{path}/lun_{}", written(&mapped["index"]));
            let number = written(&mapped["tpg_lun"]);
            let lun = format!("{tpg}/lun/lun_{number}");
            let Ok(lun_dir) = self.shell.at(&lun) else {
                // If a LUN was left out, it has already been reported.
                if items(group, "luns").all(|lun| written(&lun["index"]) != number) {
                    let why = format!("the portal group has no LUN {number}: this LUN is omitted");
                    self.note(&dir, why);
                }
                continue;
            };
            let is_linked = self.shell.tree.links(lun_dir.node()).next().is_some();
            if is_linked
                && self.mkdir(&dir, &dir, "invalid number of a LUN")
                && self.link(&format!("{dir}/{}", alias(mapped)), &lun)
            {
                let protect = flag(&mapped["write_protect"]).unwrap_or(false);
                let file = format!("{dir}/write_protect");
                let result = self.write(&file, &u8::from(protect).to_string());
                self.done(&file, result, "invalid value");
            }
        }
        if let Some(tag) = acl["tag"].as_str() {
            self.set(&format!("{path}/tag"), tag);
        }
        self.login(&format!("{path}/auth"), "chap_", acl);
    }

    /// Reports all initiators in a portal group that must authenticate but have no credentials.
    /// These initiators can't log in to LIO either.
    fn name_refused(&mut self, tpg: &str) {
        let value = |shell: &Shell<'_>, path: &str| {
            let text = shell.read(path).unwrap_or_default();
            text.trim_end().to_owned()
        };
        let has_login = |shell: &Shell<'_>, dir: &str| {
            let files = ["userid", "password"].map(|file| format!("{dir}/auth/{file}"));
            files.iter().all(|file| !value(shell, file).is_empty())
        };
        let is_required = value(&self.shell, &format!("{tpg}/attrib/authentication")) == "1";
        let acls = self.shell.tree.find(&format!("target/{tpg}/acls"));
        let acls = acls
            .into_iter()
            .flat_map(|acls| self.shell.tree.subdirs(acls));
        let names: Vec<String> = acls.map(|(name, _)| format!("{tpg}/acls/{name}")).collect();
        let why = "authentication is required and no credentials are set: no login can succeed";
        for acl in names {
            let own = value(&self.shell, &format!("{acl}/attrib/authentication"));
            let is_required = own == "1" || own == "-1" && is_required;
            if is_required && !has_login(&self.shell, &acl) {
                self.note(&acl, why);
            }
        }
        let is_open = value(&self.shell, &format!("{tpg}/attrib/generate_node_acls")) == "1";
        if is_open && is_required && !has_login(&self.shell, tpg) {
            self.note(&format!("{tpg}/attrib/generate_node_acls = 1"), why);
        }
    }
}

/// Returns the name of a link.
fn alias(of: &Value) -> &str {
    match text(of, "alias") {
        "" => "restored",
        alias => alias,
    }
}
