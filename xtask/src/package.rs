//! `cargo xtask package`: the Debian package, and what happens to a system that gets it.
//!
//! The package is built twice, the second time with a later version. Both go into a Debian root
//! that is made for it, where systemd runs as init in a container with a network of its own; there
//! `tests/package/install.sh` installs, uses, upgrades, removes and purges them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use crate::packages::{Need, ensure, have_program, need};
use crate::sh::{self, cmd};
use crate::{Failure, daemon, root};

pub(crate) const NEEDS: &[Need] = &[
    need("dpkg-shlibdeps", "dpkg-dev", "building the package"),
    need("mmdebstrap", "mmdebstrap", "a Debian root to install it in"),
    need(
        "systemd-nspawn",
        "systemd-container",
        "systemd in that root",
    ),
];

/// The programs that write manual pages and completions.
const DOCUMENTING: [&str; 2] = ["riserd", "riser"];

/// Those that write manual pages only.
const SERVICES: [&str; 2] = ["riser-sa", "riser-iwpmd"];

/// Packages of Debian that ours needs, so that it can be installed without a network, programs that are
/// run on its libraries, and ibacm, whose place riser-sa takes.
const INCLUDE: &str =
    "--include=systemd,systemd-sysv,dbus,fuse3,procps,ibverbs-utils,perftest,ibacm";

/// Options of `cargo xtask package`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Build the package only.
    #[arg(long)]
    no_test: bool,
}

/// The subcommand of Cargo that makes the package.
pub(crate) const SUBCOMMAND: &str = "cargo-deb";

/// Builds the package and, unless the options say otherwise, tries it. Fails before it builds
/// anything if something is missing for that.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let needs = if options.no_test { &NEEDS[..1] } else { NEEDS };
    if let Some(need) = ensure(needs).first() {
        let (program, purpose) = (need.program, need.purpose);
        return Err(format!("{program} is missing, for {purpose}").into());
    }
    have_program(SUBCOMMAND)?;
    if options.no_test {
        return build_package(RELEASE, env!("CARGO_PKG_VERSION")).map(drop);
    }
    if !sh::is_root() {
        return Err(format!("{WANTS_ROOT}; --no-test only builds the package").into());
    }
    build_and_install(RELEASE)
}

/// The profile of what is shipped.
const RELEASE: &str = "release";

/// The reason why only root can try the package.
pub(crate) const WANTS_ROOT: &str = "a Debian root is made and entered by root only";

/// Builds the package twice, with programs of a profile of Cargo's, and tries both in a Debian root of
/// its own.
pub(crate) fn build_and_install(profile: &str) -> Result<(), Failure> {
    let version = env!("CARGO_PKG_VERSION");
    let deb = build_package(profile, version)?;
    // The same programs under a later version: an upgrade is tried, and not another program.
    let later = package(profile, &format!("{version}+later"))?;
    test(&folder(), &deb, &later)
}

/// The folder of packages and of the Debian root.
fn folder() -> PathBuf {
    root().join(".build/package")
}

/// Builds the programs and the package, and shows what is in it.
fn build_package(profile: &str, version: &str) -> Result<PathBuf, Failure> {
    fs::create_dir_all(folder())?;
    build(profile)?;
    let deb = package(profile, version)?;
    println!("built {}", deb.display());
    println!(
        "{}",
        sh::output(&mut cmd("dpkg-deb", ["--info".as_ref(), deb.as_os_str()]))?
    );
    Ok(deb)
}

/// The programs, and what they write of themselves.
fn build(profile: &str) -> Result<(), Failure> {
    let programs = daemon::build_in(profile)?;
    let texts = programs.join("package");
    // Emptied: a page of a command that is gone must not be packed.
    let _ = fs::remove_dir_all(&texts);
    let man = texts.join("man");
    fs::create_dir_all(&man)?;
    // Manual pages, completions and the schema come from the programs that were just built, so a
    // package never has those of another version.
    for program in DOCUMENTING.iter().chain(&SERVICES) {
        sh::run(cmd(programs.join(program), ["man", "--dir"]).arg(&man))?;
    }
    for program in DOCUMENTING {
        let exe = programs.join(program);
        for (shell, file) in [
            ("bash", program.to_owned()),
            ("zsh", format!("_{program}")),
            ("fish", format!("{program}.fish")),
        ] {
            let dir = texts.join("completions").join(shell);
            fs::create_dir_all(&dir)?;
            let script = sh::output(&mut cmd(&exe, ["completions", shell]))?;
            fs::write(dir.join(file), script)?;
        }
    }
    let pages = fs::read_dir(&man)?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<Vec<_>, Failure>>()?;
    sh::run(cmd("gzip", ["-9n"]).args(&pages))?;
    for page in pages {
        // `man` looks for a page in the folder of its section.
        let section = page.extension().unwrap_or_default().display();
        let folder = man.join(format!("man{section}"));
        fs::create_dir_all(&folder)?;
        let name = format!("{}.gz", page.file_name().unwrap_or_default().display());
        fs::rename(man.join(&name), folder.join(&name))?;
    }
    let schema = sh::output(&mut cmd(programs.join("riserd"), ["schema"]))?;
    fs::write(texts.join("riserd.schema.json"), schema)?;
    Ok(())
}

/// A package with a version.
fn package(profile: &str, version: &str) -> Result<PathBuf, Failure> {
    let deb = folder().join(format!("riser_{version}.deb"));
    let mut command = sh::cargo(["deb", "-p", "riser-target", "--no-build", "--strip"]);
    // It looks in this profile's folder for what the manifest says to be in that of releases.
    command.args(["--profile", profile, "--deb-version", version, "--output"]);
    sh::run(command.arg(&deb))?;
    Ok(deb)
}

/// Installs in a root of its own; see the script.
fn test(out: &Path, deb: &Path, later: &Path) -> Result<(), Failure> {
    // The bare root is kept, since it takes long to make; what is tried is unpacked from it each
    // time.
    let (tar, list) = (out.join("debian.tar"), out.join("debian.packages"));
    if !tar.is_file() || fs::read_to_string(&list).ok().as_deref() != Some(INCLUDE) {
        println!("making a Debian root");
        debian(&tar)?;
        fs::write(&list, INCLUDE)?;
    }
    let dir = out.join("root");
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(dir.join("test"))?;
    sh::run(cmd("tar", ["-xpf"]).arg(&tar).arg("-C").arg(&dir))?;
    fs::copy(deb, dir.join("test/old.deb"))?;
    fs::copy(later, dir.join("test/new.deb"))?;
    fs::copy(
        root().join("tests/package/install.sh"),
        dir.join("test/install.sh"),
    )?;
    // The last that the container's init does is to end with the script's status.
    let unit = dir.join("etc/systemd/system/test.service");
    fs::write(
        unit,
        "[Unit]\nAfter=multi-user.target\nSuccessAction=exit\nFailureAction=exit\n\
         [Service]\nType=oneshot\nExecStart=/bin/bash /test/install.sh\n\
         StandardOutput=file:/test/log\nStandardError=file:/test/log\n",
    )?;
    let wants = dir.join("etc/systemd/system/multi-user.target.wants");
    fs::create_dir_all(&wants)?;
    std::os::unix::fs::symlink(
        "/etc/systemd/system/test.service",
        wants.join("test.service"),
    )?;
    let mut container = cmd(
        "systemd-nspawn",
        [
            "--quiet",
            "--boot",
            "--register=no",
            "--keep-unit",
            "--private-network",
            "--bind=/dev/fuse",
            "--directory",
        ],
    );
    let status = container
        .arg(&dir)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()?;
    let log = fs::read_to_string(dir.join("test/log")).unwrap_or_default();
    println!("{log}");
    // The last line besides the status: a container that ends before the script has begun may end
    // well, too.
    if status.success() && log.ends_with("--- all is well\n") {
        let _ = fs::remove_dir_all(&dir);
        Ok(())
    } else {
        Err(format!("the installation ended with {status}").into())
    }
}

/// A Debian root of the release that this machine runs, from the archive that it uses.
fn debian(tar: &Path) -> Result<(), Failure> {
    let release = fs::read_to_string("/etc/os-release")?;
    let suite = release
        .lines()
        .find_map(|l| l.strip_prefix("VERSION_CODENAME="))
        .ok_or("/etc/os-release names no suite")?;
    // Under another name until it is whole: a root that was ended halfway would be used for ever.
    let half = tar.with_extension("half");
    let mut command = cmd(
        "mmdebstrap",
        ["--quiet", "--variant=minbase", "--format=tar", INCLUDE],
    );
    // How the archive is reached, and nothing that needs programs which the root lacks.
    for option in acquire_options()? {
        command.arg(format!("--aptopt={option}"));
    }
    command.arg(suite).arg(&half).args(sources()?);
    sh::run(&mut command)?;
    Ok(fs::rename(half, tar)?)
}

fn acquire_options() -> Result<Vec<String>, Failure> {
    let dump = sh::output(&mut cmd("apt-config", ["dump"]))?;
    let wanted = [
        "Acquire::Check-",
        "Acquire::http::Proxy",
        "Acquire::https::Proxy",
    ];
    let is_wanted = |line: &&str| wanted.iter().any(|w| line.starts_with(w));
    Ok(dump.lines().filter(is_wanted).map(str::to_owned).collect())
}

/// Files by which apt finds packages here.
fn sources() -> Result<Vec<PathBuf>, Failure> {
    let mut sources = Vec::new();
    let single = PathBuf::from("/etc/apt/sources.list");
    if fs::metadata(&single).is_ok_and(|m| m.len() > 0) {
        sources.push(single);
    }
    if let Ok(entries) = fs::read_dir("/etc/apt/sources.list.d") {
        for entry in entries {
            let path = entry?.path();
            if path
                .extension()
                .is_some_and(|e| e == "list" || e == "sources")
            {
                sources.push(path);
            }
        }
    }
    sources.sort();
    Ok(sources)
}
