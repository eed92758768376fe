//! A simulated machine that is one node. Its disk survives a power cut, and its boot id changes at each boot.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::json;

use super::config;
use super::fabric::Fabric;
use super::guest::Guest;
use super::holder::Holder;
use super::machines::Core;
use super::node_software::NodeSide;
use super::{available, node_software};
use crate::assets::{self, Program};
use crate::wait;

const LIMIT: Duration = Duration::from_secs(180);

/// Sets up the machine's namespaces. `$1` is the machine's folder, `$2` its name. The machine has its own /etc, /opt,
/// /var and /run, as far as a node reads or writes there. All other files are the host's. Kubelets require shared
/// mounts. The mounts become shared only at the end, because a mount that was shared earlier would also appear wherever
/// else the same folder is mounted.
const BOOT: &str = r#"
hostname "$2"
mount --bind /etc "$1/host-etc"
mount -o remount,bind,ro "$1/host-etc"
mount -t tmpfs -o mode=0755 tmpfs /etc
for entry in "$1/host-etc/"*; do ln -s "$entry" /etc/; done
rm -f /etc/cni /etc/containerd /etc/hostname /etc/hosts /etc/kubernetes /etc/machine-id /etc/resolv.conf
mkdir /etc/cni
mount --bind "$1/cni" /etc/cni
echo "$2" > /etc/hostname
echo "127.0.0.1 localhost" > /etc/hosts
: > /etc/resolv.conf
cp "$1/machine-id" /etc/machine-id
mount --bind "$1/opt" /opt
mount --bind "$1/var" /var
mount -t tmpfs -o mode=0755 tmpfs /run
mkdir /run/lock
for file in "$1/sysctl/"*; do
    name=${file##*/}
    mount --bind "$file" "/proc/sys/$(echo "$name" | tr : /)"
done
echo 1 > /proc/sys/net/ipv4/ip_forward
echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
echo 0 > /proc/sys/net/ipv6/conf/default/accept_dad
mount --make-rshared /
"#;

/// A wrapper for main plugins that wait until the kernel has checked that no other host has the pod's IPv6 address. The
/// wait takes one to two seconds, and on a busy host the plugin gives up after five. The wrapper switches the check
/// off. The plugin bridge needs no wrapper, because it does not wait.
const WITHOUT_DAD: &str = r#"#!/bin/sh
[ "$CNI_COMMAND" != ADD ] ||
    nsenter --net="$CNI_NETNS" sh -c 'echo 0 > /proc/sys/net/ipv6/conf/default/accept_dad'
exec "$0-wrapped"
"#;

/// Settings for [`Site::machine`](super::Site::machine).
#[derive(Clone, Debug, Default)]
pub struct MachineOptions {
    /// Labels with which the kubelet registers the Node
    pub labels: Vec<(String, String)>,
    /// The CNI plugins, their configuration and the agent
    pub side: NodeSide,
    /// Whether the machine has a second interface, `eth1`, for second networks of pods
    pub second_link: bool,
}

/// A machine of a [`Site`](super::Site), powered off when dropped.
#[derive(Debug)]
pub struct Machine {
    name: String,
    number: u8,
    folder: PathBuf,
    options: MachineOptions,
    power: Option<Power>,
    core: std::sync::Arc<Core>,
}

/// The processes and namespaces that exist while the machine has power. Fields are dropped in the order in which they
/// are declared, so the holder is dropped last.
#[derive(Debug)]
struct Power {
    agent: Option<Guest>,
    kubelet: Option<Guest>,
    containerd: Option<Guest>,
    holder: Holder,
}

impl Machine {
    pub(super) async fn start(
        core: std::sync::Arc<Core>,
        number: u8,
        options: MachineOptions,
    ) -> Result<Self> {
        let name = format!("n{number}");
        let folder = core.folder().join(&name);
        let mut this = Self {
            name,
            number,
            folder,
            options,
            power: None,
            core,
        };
        this.populate()?;
        this.boot().await?;
        Ok(this)
    }

    /// The name of the machine's Node: `n` followed by the machine's number.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The machine's number, which determines its addresses on the fabric.
    pub fn number(&self) -> u8 {
        self.number
    }

    /// The folder on the host with the machine's logs and disk.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The folder on the host that is `/var` inside the machine.
    pub fn var(&self) -> PathBuf {
        self.folder.join("var")
    }

    /// Powers the machine on with a new boot id and the old disk. Starts containerd, the agent if there is one, and the
    /// kubelet. Does not wait until the Node is ready.
    pub async fn boot(&mut self) -> Result<()> {
        let source = if self.core.host_boot_id {
            "/proc/sys/kernel/random/boot_id"
        } else {
            "/proc/sys/kernel/random/uuid"
        };
        let boot_id = fs::read_to_string(source)?;
        fs::write(self.folder.join("sysctl/kernel:random:boot_id"), boot_id)?;
        let cgroup = self.core.cgroups.of(&self.name)?;
        let kubelet = config::kubelet(&cgroup).to_string();
        fs::write(self.folder.join("kubelet.json"), kubelet)?;
        let args = [self.name.as_str()];
        let holder = Holder::start(&self.name, BOOT, &self.folder, &args).await?;
        self.core.fabric.plug(self.number, &holder).await?;
        if self.options.second_link {
            self.core.fabric.plug_second(self.number, &holder).await?;
        }
        self.power = Some(Power {
            agent: None,
            kubelet: None,
            containerd: None,
            holder,
        });
        self.start_containerd().await?;
        self.start_agent().await?;
        self.start_kubelet().await
    }

    /// Cuts the machine's power: all its processes are killed at once, and the disk stays.
    pub async fn power_off(&mut self) -> Result<()> {
        if let Some(power) = self.power.take() {
            power.holder.kill().await?;
            self.core.cgroups.clear(&self.name).await?;
        }
        Ok(())
    }

    /// Runs a program inside the machine and returns its standard output.
    pub async fn run<S: AsRef<OsStr>>(&self, args: &[S]) -> Result<String> {
        self.power()?.holder.run(args).await
    }

    /// Runs a program of the image in a running container and returns its standard output. `container_id` has the form
    /// of a pod's `status.containerStatuses[].containerID`.
    pub async fn run_in_pod(&self, container_id: &str, args: &[&str]) -> Result<String> {
        use std::sync::atomic::{AtomicU32, Ordering};
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let id = container_id.trim_start_matches("containerd://");
        let exec = format!("e2e-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let ctr = assets::find(Program::Ctr)?;
        let ctr = ctr.to_string_lossy();
        let mut all = vec![
            &*ctr,
            "-n",
            "k8s.io",
            "task",
            "exec",
            "--exec-id",
            &exec,
            id,
        ];
        all.extend(args);
        self.run(&all).await
    }

    /// Starts a program inside the machine, which logs to `NAME.log` in the machine's folder.
    pub async fn spawn<S: AsRef<OsStr>>(&self, name: &str, args: &[S]) -> Result<Guest> {
        self.power()?.holder.spawn(name, &[], args).await
    }

    /// The process of containerd, for sending signals. [`Self::start_containerd`] starts a new process.
    pub fn containerd(&mut self) -> Result<&mut Guest> {
        let power = self.power_mut()?;
        power.containerd.as_mut().context("containerd does not run")
    }

    /// The process of the kubelet, for sending signals. [`Self::start_kubelet`] starts a new process.
    pub fn kubelet(&mut self) -> Result<&mut Guest> {
        let power = self.power_mut()?;
        power.kubelet.as_mut().context("the kubelet does not run")
    }

    /// The process of the agent, for sending signals. [`Self::start_agent`] starts a new process.
    pub fn agent(&mut self) -> Result<&mut Guest> {
        let power = self.power_mut()?;
        power.agent.as_mut().context("no agent runs")
    }

    /// Replaces the CNI plugins, their configuration and the agent. The files are replaced first. Then, if the machine
    /// has power, the agent is restarted.
    pub async fn set_side(&mut self, side: NodeSide) -> Result<()> {
        node_software::install(&self.options.side, &side, &self.folder)?;
        self.options.side = side;
        if let Some(power) = &mut self.power {
            if let Some(mut agent) = power.agent.take() {
                agent.kill().await?;
            }
            self.start_agent().await?;
        }
        Ok(())
    }

    /// Starts containerd and returns when containerd answers. The first start also imports the images.
    pub async fn start_containerd(&mut self) -> Result<()> {
        let binary = assets::find(Program::Containerd)?;
        // containerd looks for its shim by name in PATH. So the folder of containerd comes first in PATH.
        let path = std::env::var("PATH").unwrap_or_default();
        let path = match binary.parent() {
            Some(folder) => format!("{}:{path}:/usr/sbin:/sbin", folder.display()),
            None => path,
        };
        let config = self.folder.join("containerd.toml");
        let args = [binary.as_os_str(), "--config".as_ref(), config.as_ref()];
        let holder = &self.power()?.holder;
        let mut guest = holder.spawn("containerd", &[("PATH", path)], &args).await?;
        let ctr = assets::find(Program::Ctr)?;
        let ctr = |args: &[&str]| -> Vec<std::ffi::OsString> {
            let all = ["-n", "k8s.io"].iter().chain(args).map(Into::into);
            std::iter::once(ctr.clone().into()).chain(all).collect()
        };
        wait::until("containerd serves", LIMIT, async || {
            guest.check_running()?;
            // The socket is checked first, because ctr would retry for 10 s while the socket does not exist.
            self.run(&["test", "-S", config::CRI]).await?;
            Ok(Some(self.run(&ctr(&["images", "list", "-q"])).await?))
        })
        .await
        .with_context(|| guest.log_tail(30))?;
        let imported = self.folder.join("imported");
        if !imported.exists() {
            for image in &self.core.images {
                let image = image.to_string_lossy();
                self.run(&ctr(&["images", "import", &image])).await?;
            }
            fs::write(imported, "")?;
        }
        self.power_mut()?.containerd = Some(guest);
        Ok(())
    }

    /// Starts the kubelet. Does not wait until it is ready.
    pub async fn start_kubelet(&mut self) -> Result<()> {
        let [v4, v6] = Fabric::addresses(self.number);
        let labels = self.options.labels.iter();
        let labels: Vec<String> = labels
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        let flag = |name: &str, path: PathBuf| format!("--{name}={}", path.display());
        let args = [
            assets::find(Program::Kubelet)?.display().to_string(),
            flag("config", self.folder.join("kubelet.json")),
            flag("kubeconfig", self.core.kubeconfig(&user(self.number))?),
            format!("--hostname-override={}", self.name),
            format!("--node-ip={v4},{v6}"),
            format!("--node-labels={}", labels.join(",")),
        ];
        let guest = self.power()?.holder.spawn("kubelet", &[], &args).await?;
        self.power_mut()?.kubelet = Some(guest);
        Ok(())
    }

    /// Starts kube-proxy, which runs until the returned value is dropped or the machine loses its power. Does not wait
    /// until it is ready. Call [`kube_proxy()`](super::kube_proxy) before, to check that it can run on this host.
    pub async fn start_kube_proxy(&self) -> Result<Guest> {
        let kubeconfig = self.core.kubeconfig(PROXY)?;
        let config = self.folder.join("kube-proxy.json");
        fs::write(
            &config,
            config::kube_proxy(&self.name, &kubeconfig).to_string(),
        )?;
        let program = assets::find(Program::KubeProxy)?.display().to_string();
        let args = [program, format!("--config={}", config.display())];
        // kube-proxy looks for iptables by name in PATH.
        let path = std::env::var("PATH").unwrap_or_default();
        let path = format!("{path}:/usr/sbin:/sbin");
        let holder = &self.power()?.holder;
        holder.spawn("kube-proxy", &[("PATH", path)], &args).await
    }

    /// Starts the agent if `NodeSide` has one. Does not wait until it is ready.
    pub async fn start_agent(&mut self) -> Result<()> {
        let Some(agent) = &self.options.side.agent else {
            return Ok(());
        };
        let mut env: Vec<(&str, String)> = vec![("NODE_NAME", self.name.clone())];
        let kubeconfig = self.core.kubeconfig(&agent.user)?;
        env.push(("KUBECONFIG", kubeconfig.display().to_string()));
        let guest = self.power()?.holder.spawn("agent", &env, &agent.args);
        let guest = guest.await?;
        self.power_mut()?.agent = Some(guest);
        Ok(())
    }

    fn power(&self) -> Result<&Power> {
        let off = || format!("machine {} is switched off", self.name);
        self.power.as_ref().with_context(off)
    }

    fn power_mut(&mut self) -> Result<&mut Power> {
        let off = || format!("machine {} is switched off", self.name);
        self.power.as_mut().with_context(off)
    }

    /// Writes the initial content of the machine's folder: disk, settings, configuration and CNI plugins.
    fn populate(&self) -> Result<()> {
        let folder = &self.folder;
        for name in [
            "cni/net.d",
            "host-etc",
            "opt/cni/bin",
            "sysctl",
            "var/cache",
            "var/lib/containerd",
            "var/lib/kubelet",
            "var/log/containers",
            "var/log/pods",
            "var/tmp",
        ] {
            let path = folder.join(name);
            fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        }
        for (link, to) in [("run", "/run"), ("lock", "/run/lock")] {
            std::os::unix::fs::symlink(to, folder.join("var").join(link))?;
        }
        for (name, value) in config::SYSCTLS {
            let name = name.replace('/', ":");
            fs::write(folder.join("sysctl").join(name), format!("{value}\n"))?;
        }
        let machine_id = fs::read_to_string("/proc/sys/kernel/random/uuid")?;
        fs::write(folder.join("machine-id"), machine_id.replace('-', ""))?;
        let runc = available::find("runc").context("runc is missing: apt-get install runc")?;
        fs::write(folder.join("containerd.toml"), config::containerd(&runc))?;
        let plugins = folder.join("opt/cni/bin");
        for plugin in [
            Program::Bridge,
            Program::HostLocal,
            Program::Loopback,
            Program::Portmap,
        ] {
            fs::copy(assets::find(plugin)?, plugins.join(plugin.name()))?;
        }
        for plugin in [Program::Ipvlan, Program::Macvlan, Program::Ptp] {
            let name = plugin.name();
            fs::copy(
                assets::find(plugin)?,
                plugins.join(format!("{name}-wrapped")),
            )?;
            write_executable(&plugins.join(name), WITHOUT_DAD)?;
        }
        node_software::install(&NodeSide::default(), &self.options.side, folder)
    }
}

fn write_executable(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

/// The user as which each kube-proxy authenticates. A ClusterRoleBinding that the API server creates by itself grants
/// the role `system:node-proxier` to this user.
pub(super) const PROXY: &str = "system:kube-proxy";

/// Returns the user as which a machine's kubelet authenticates to the API server.
pub(super) fn user(number: u8) -> String {
    format!("system:node:n{number}")
}

/// Returns the `cluster` entry of a kubeconfig for use inside machines. The entry sets the server's name, because the
/// server's certificate is for localhost.
pub(super) fn server() -> serde_json::Value {
    json!({
        "server": format!("https://{}", super::fabric::API),
        "tls-server-name": "localhost",
    })
}
