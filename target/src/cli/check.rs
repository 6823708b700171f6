//! Configuration files: reading them, their mistakes with the lines that they are in, and what they would
//! serve.

use std::path::Path;

use miette::{LabeledSpan, MietteDiagnostic, NamedSource, Report};
use serde_json::json;

use super::ask::Output;
use super::{Failure, MISTAKE};
use crate::config::{Access, Config, ConfigError, HostId, Protocol};
use crate::control::upgrade;

pub(super) fn load(path: &Path) -> Result<Config, Failure> {
    read(path).map(|(config, _)| config)
}

/// The text of a configuration file without a mistake.
pub(super) fn checked(path: &Path) -> Result<String, Failure> {
    read(path).map(|(_, text)| text)
}

fn read(path: &Path) -> Result<(Config, String), Failure> {
    let text = std::fs::read(path).map_err(|e| Failure {
        text: format!("riserd: {}: cannot read it: {e}", path.display()),
        code: MISTAKE,
    })?;
    let text = String::from_utf8(text).map_err(|e| Failure {
        text: format!(
            "riserd: {}: not UTF-8 from byte {} on",
            path.display(),
            e.utf8_error().valid_up_to()
        ),
        code: MISTAKE,
    })?;
    match Config::parse(&text, &path.display().to_string()) {
        Ok(config) => Ok((config, text)),
        Err(e) => Err(Failure {
            text: report(&e, text),
            code: MISTAKE,
        }),
    }
}

/// A mistake with the line it is in. The first line is the one that scripts and editors look for:
/// `file:line:column: message`.
fn report(error: &ConfigError, text: String) -> String {
    let offset = error.offset_in(&text);
    let mut diagnostic =
        MietteDiagnostic::new(&error.message).with_label(LabeledSpan::at_offset(offset, "here"));
    if let Some(hint) = &error.hint {
        diagnostic = diagnostic.with_help(hint.clone());
    }
    let report = Report::new(diagnostic).with_source_code(NamedSource::new(&error.file, text));
    format!("{error}\n{report:?}")
}

pub(super) fn describe(config: &Config, output: Output) -> String {
    let host = HostId::of(config);
    match output {
        Output::Json => describe_json(config, &host),
        Output::Text => describe_text(config, &host),
    }
}

fn describe_text(config: &Config, host: &HostId) -> String {
    let mut lines = vec![format!(
        "valid: {} backend(s), {} target(s)",
        config.backends.len(),
        config.targets.len()
    )];
    for target in &config.targets {
        lines.push(format!("target {}", target.name));
        for portal in &target.portals {
            lines.push(match (portal.protocol, &target.iqn) {
                (Protocol::Iscsi | Protocol::Iser, Some(iqn)) => {
                    format!("  {} {} {iqn}", portal.protocol, portal.listen)
                }
                _ => {
                    let guid = portal.ioc_guid(host, &target.name);
                    format!("  srp {} ioc_guid {guid}", portal.listen)
                }
            });
        }
        for (number, lun) in &target.luns {
            let backend = config.backend(lun);
            let serial = backend.identity(host).serial;
            let mode = if lun.read_only || backend.spec.read_only {
                ", read-only"
            } else {
                ""
            };
            lines.push(format!(
                "  lun {number}: {}, serial {serial}{mode}",
                backend.name
            ));
        }
        lines.push(match &target.access {
            Access::Open => "  access: open to everybody".to_owned(),
            Access::Rules(rules) => format!("  access: {} rule(s)", rules.len()),
        });
    }
    lines.extend(config.notes.iter().map(|n| format!("note: {n}")));
    lines.join("\n")
}

fn describe_json(config: &Config, host: &HostId) -> String {
    let targets: Vec<_> = config
        .targets
        .iter()
        .map(|t| {
            let portals: Vec<_> = t
                .portals
                .iter()
                .map(|p| match (p.protocol, &t.iqn) {
                    (Protocol::Iscsi | Protocol::Iser, Some(iqn)) => json!({
                        "protocol": p.protocol.to_string(),
                        "listen": p.listen.to_string(),
                        "iqn": iqn.as_str(),
                    }),
                    _ => json!({
                        "protocol": "srp",
                        "listen": p.listen.to_string(),
                        "ioc_guid": p.ioc_guid(host, &t.name).to_string(),
                        "id_ext": p.id_ext(host, &t.name).to_string(),
                        "service_guid": p.service_guid(host, &t.name).to_string(),
                    }),
                })
                .collect();
            let luns: Vec<_> = t
                .luns
                .iter()
                .map(|(number, lun)| {
                    let backend = config.backend(lun);
                    json!({
                        "lun": number,
                        "backend": backend.name,
                        "serial": backend.identity(host).serial,
                        "read_only": lun.read_only || backend.spec.read_only,
                    })
                })
                .collect();
            json!({
                "name": t.name,
                "portals": portals,
                "luns": luns,
                "open": t.access == Access::Open,
            })
        })
        .collect();
    json!({
        "valid": true,
        "version": env!("CARGO_PKG_VERSION"),
        "takes_over": [upgrade::VERSION],
        "targets": targets,
        "notes": config.notes,
    })
    .to_string()
}
