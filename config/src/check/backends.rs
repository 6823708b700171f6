//! Backend checks: sources, sizes and names.

use std::collections::HashMap;
use std::path::PathBuf;

use riser_scsi::config::{Protection, ProtectionType};

use super::names::{is_name, name_mistake};
use super::paths::{normal, whole_path};
use crate::mistake::{Checked, Mistake};
use crate::model::{Backend, Names};
use crate::source::{Direct, Source, Spec, TagOwner};
use crate::yaml::Located;
use crate::{io_check, raw};

pub(super) fn backends(raw: Vec<(String, Located<raw::Backend>)>) -> Checked<Vec<Backend>> {
    let mut files: HashMap<PathBuf, String> = HashMap::new();
    let mut out = Vec::new();
    for (name, b) in raw {
        let path = format!("backends.{name}");
        if !is_name(&name) {
            return Err(name_mistake(b.at, &path, &name));
        }
        let backend = backend(&name, &path, &b)?;
        if let Source::File { path: file, .. } | Source::Device { path: file } =
            &backend.spec.source
            // We only compare the path text, because a configuration can be checked on another
            // host. Links are detected when the file is opened, because it can only be locked once.
            && let Some(other) = files.insert(normal(file), name.clone())
        {
            let at = b.value.path.as_ref().map_or(b.at, |p| p.at);
            return Err(Mistake::new(
                at,
                format!("{path}.path"),
                format!("{} is already backend `{other}`", file.display()),
            )
            .hint("a single backend can be a LUN of several targets"));
        }
        check_unique(&path, &b.value, &backend, &out)?;
        out.push(backend);
    }
    Ok(out)
}

/// Rejects a serial number or world-wide name that is already used by another backend. Initiators
/// use these to identify a disk, so multipath would merge two disks into one device.
fn check_unique(
    path: &str,
    b: &raw::Backend,
    backend: &Backend,
    others: &[Backend],
) -> Checked<()> {
    let names = &backend.names;
    let mut same_naa = others
        .iter()
        .filter(|other| names.naa.is_some() && other.names.naa == names.naa);
    let mut same_serial = others
        .iter()
        .filter(|other| names.serial.is_some() && other.names.serial == names.serial);
    let (key, at, other, what) = match (same_naa.next(), same_serial.next()) {
        (Some(other), _) => (
            "naa",
            b.naa.as_ref().map(|l| l.at),
            other,
            "world-wide name",
        ),
        (None, Some(other)) => (
            "serial",
            b.serial.as_ref().map(|l| l.at),
            other,
            "serial number",
        ),
        (None, None) => return Ok(()),
    };
    let message = format!("backend `{}` already has this {what}", other.name);
    Err(
        Mistake::new(at.unwrap_or_default(), format!("{path}.{key}"), message)
            .hint("initiators treat disks with the same name as paths to a single disk"),
    )
}

fn backend(name: &str, path: &str, located: &Located<raw::Backend>) -> Checked<Backend> {
    let b = &located.value;
    let at = |key: &str| format!("{path}.{key}");
    let block_size = match &b.block_size {
        None => 512,
        // SCSI supports other sizes, but few operating systems can use such disks.
        Some(v) if matches!(v.value, 512 | 4096) => v.value as u32,
        Some(v) => {
            let message = format!("unsupported block size {}: must be 512 or 4096", v.value);
            return Err(Mistake::new(v.at, at("block_size"), message));
        }
    };
    // We cannot check this in the type, because the block size is a different key.
    if let Some(size) = &b.size {
        let bytes = size.value.0;
        if bytes == 0 || !bytes.is_multiple_of(u64::from(block_size)) {
            let message =
                format!("{bytes} bytes are not a multiple of the block size, {block_size} bytes");
            return Err(Mistake::new(size.at, at("size"), message));
        }
    }
    let read_only = b.read_only.unwrap_or(false);
    Ok(Backend {
        name: name.to_owned(),
        spec: Spec {
            name: name.to_owned(),
            source: source(path, located)?,
            block_size,
            protection: protection(path, b)?,
            direct: b.direct.as_ref().map(|d| d.value).unwrap_or_default(),
            write_cache: b.write_cache.is_none_or(|w| w.0),
            read_only,
            faults: None,
        },
        thin: b.thin.unwrap_or(true),
        threshold: threshold(path, b)?,
        stoppable: b.stoppable.unwrap_or(false),
        rotational: b.rotational,
        names: names(path, b)?,
        limits: io_check::check(path, b.limits.as_ref())?,
    })
}

/// Returns the protection information of each block.
fn protection(path: &str, b: &raw::Backend) -> Checked<Option<Protection>> {
    let Some(Located { value, .. }) = &b.protection else {
        return Ok(None);
    };
    if let Some(direct) = b.direct.as_ref().filter(|d| d.value == Direct::On) {
        let message = "direct I/O is not supported with `protection`";
        return Err(Mistake::new(direct.at, format!("{path}.direct"), message));
    }
    let located = &value.protection_type;
    let protection_type = match located.value {
        1 => ProtectionType::Type1,
        2 => ProtectionType::Type2,
        3 => ProtectionType::Type3,
        other => {
            let message = format!("unsupported protection type {other}: must be 1, 2 or 3");
            let place = format!("{path}.protection.type");
            return Err(Mistake::new(located.at, place, message));
        }
    };
    Ok(Some(Protection {
        protection_type,
        client_owns_tag: value.owner == Some(TagOwner::Client),
    }))
}

/// Returns the threshold for a thin file, in percent.
fn threshold(path: &str, b: &raw::Backend) -> Checked<Option<u8>> {
    let Some(located) = &b.threshold else {
        return Ok(None);
    };
    let wrong = |message: &str| {
        let place = format!("{path}.threshold");
        Err(Mistake::new(located.at, place, message.to_owned()))
    };
    if b.kind != raw::Kind::File || b.thin == Some(false) {
        return wrong("`threshold` is only supported for thin backends of kind file");
    }
    match located.value.whole() {
        Some(percent @ 1..100) => Ok(Some(percent)),
        _ => wrong("must be a whole number of percent from 1 to 99"),
    }
}

/// Returns the keyword for a kind.
fn kind_name(kind: raw::Kind) -> &'static str {
    match kind {
        raw::Kind::File => "file",
        raw::Kind::Device => "device",
        raw::Kind::Ram => "ram",
        raw::Kind::Null => "null",
    }
}

/// Rejects keys that are not supported by this backend kind.
fn check_keys(path: &str, b: &raw::Backend) -> Checked<()> {
    use raw::Kind;
    let has_path = matches!(b.kind, Kind::File | Kind::Device);
    let keys = [
        ("path", has_path, b.path.as_ref().map(|v| v.at)),
        ("direct", has_path, b.direct.as_ref().map(|v| v.at)),
        (
            "create",
            b.kind == Kind::File,
            b.create.as_ref().map(|v| v.at),
        ),
        (
            "protection",
            b.kind != Kind::Device,
            b.protection.as_ref().map(|v| v.at),
        ),
        (
            "size",
            b.kind != Kind::Device,
            b.size.as_ref().map(|v| v.at),
        ),
    ];
    let mut alien = keys.into_iter().filter(|(_, belongs, _)| !belongs);
    match alien.find_map(|(key, _, at)| Some((key, at?))) {
        Some((key, at)) => {
            let kind = kind_name(b.kind);
            let message = format!("`{key}` is not supported for backends of kind {kind}");
            Err(Mistake::new(at, format!("{path}.{key}"), message))
        }
        None => Ok(()),
    }
}

fn source(path: &str, located: &Located<raw::Backend>) -> Checked<Source> {
    let b = &located.value;
    check_keys(path, b)?;
    let at = |key: &str| format!("{path}.{key}");
    let missing = |key: &str| {
        let kind = kind_name(b.kind);
        let message = format!("missing key `{key}`, which is required for backends of kind {kind}");
        Mistake::new(located.at, path, message)
    };
    let file = || {
        let p = b.path.as_ref().ok_or_else(|| missing("path"))?;
        match p.value.is_empty() || p.value.contains('\0') {
            true => Err(Mistake::new(
                p.at,
                at("path"),
                "invalid path: empty or with a NUL character",
            )),
            false => whole_path(&p.value, p.at, &at("path")),
        }
    };
    let size = b.size.as_ref().map(|s| s.value.0);
    match b.kind {
        raw::Kind::File => {
            let create = b.create.as_ref().filter(|c| c.value);
            // A new file needs a size, but an existing file already has one.
            if let Some(c) = create {
                if size.is_none() {
                    return Err(missing("size").hint("`create: true` requires a size"));
                }
                if b.read_only == Some(true) {
                    let message = "a read-only file cannot be created";
                    return Err(Mistake::new(c.at, at("create"), message));
                }
            }
            Ok(Source::File {
                path: file()?,
                size,
                create: create.is_some(),
            })
        }
        raw::Kind::Device => Ok(Source::Device { path: file()? }),
        raw::Kind::Ram => Ok(Source::Ram {
            size: size.ok_or_else(|| missing("size"))?,
        }),
        raw::Kind::Null => Ok(Source::Null {
            size: size.ok_or_else(|| missing("size"))?,
        }),
    }
}

fn names(path: &str, b: &raw::Backend) -> Checked<Names> {
    let text = |key: &str, value: &Option<Located<String>>, most: usize| match value {
        None => Ok(None),
        Some(v) => {
            // SPC requires ASCII data fields to use these characters. The last three lengths are
            // field sizes in INQUIRY data.
            let printable = v.value.bytes().all(|c| (0x20..0x7f).contains(&c));
            if !printable || v.value.is_empty() || v.value.len() > most {
                let message = format!("must be 1 to {most} printable ASCII characters");
                return Err(Mistake::new(v.at, format!("{path}.{key}"), message));
            }
            Ok(Some(v.value.clone()))
        }
    };
    Ok(Names {
        serial: text("serial", &b.serial, 64)?,
        naa: b.naa.as_ref().map(|n| n.value.0),
        vendor: text("vendor", &b.vendor, 8)?,
        product: text("product", &b.product, 16)?,
        revision: text("revision", &b.revision, 4)?,
    })
}
