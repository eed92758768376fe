//! The configuration of a node's containerd and kubelet.

use std::path::Path;

use serde_json::{Value, json};

use super::image::IMAGE;

/// The path of containerd's CRI socket inside a node.
pub const CRI: &str = "/run/containerd/containerd.sock";

/// The address of the Service `kube-dns`, to which pods send DNS queries. Only some tests create this Service.
pub const DNS: &str = "10.96.0.10";

/// Returns containerd's configuration, in TOML.
pub fn containerd(runc: &Path) -> String {
    format!(
        r#"version = 3
disabled_plugins = [
    "io.containerd.nri.v1.nri",
    "io.containerd.snapshotter.v1.blockfile",
    "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.erofs",
    "io.containerd.snapshotter.v1.zfs",
]

# A machine that loses its power loses its processes, not what they wrote.
[plugins."io.containerd.metadata.v1.bolt"]
no_sync = true

[plugins."io.containerd.cri.v1.images"]
snapshotter = "overlayfs"

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{IMAGE}"

[plugins."io.containerd.cri.v1.runtime"]
disable_apparmor = true
# For root without CAP_SYS_RESOURCE, as in many containers.
restrict_oom_score_adj = true

[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["/opt/cni/bin"]
conf_dir = "/etc/cni/net.d"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
BinaryName = "{}"
SystemdCgroup = false
"#,
        runc.display()
    )
}

/// Returns the kubelet's configuration, in JSON. The kubelet reports its state often and allows all requests from
/// inside the node. Features that no test uses are off.
pub fn kubelet(cgroup_root: &str) -> Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
        "authorization": {"mode": "AlwaysAllow"},
        "containerRuntimeEndpoint": format!("unix://{CRI}"),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": cgroup_root,
        "failCgroupV1": false,
        "failSwapOn": false,
        "oomScoreAdj": 0,
        "resolvConf": "",
        "clusterDomain": "cluster.local",
        "clusterDNS": [DNS],
        "evictionHard": {"memory.available": "50Mi"},
        "imageGCHighThresholdPercent": 100,
        "localStorageCapacityIsolation": false,
        "maxPods": 250,
        "nodeStatusUpdateFrequency": "2s",
        "nodeLeaseDurationSeconds": 8,
        "syncFrequency": "10s",
        "kubeAPIQPS": 200,
        "kubeAPIBurst": 400,
        "eventRecordQPS": 0,
    })
}

/// Returns the configuration of kube-proxy, in JSON. kube-proxy changes no kernel settings, because most of them apply
/// to the whole host. No pod ranges are configured, so kube-proxy masquerades no connections between pods.
pub fn kube_proxy(node: &str, kubeconfig: &Path) -> Value {
    json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": kubeconfig},
        "hostnameOverride": node,
        "mode": "iptables",
        "iptables": {"localhostNodePorts": false},
        "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    })
}

/// Kernel settings that the kubelet changes. They apply to the whole host, so a machine mounts files of its own over
/// their paths in /proc/sys.
pub const SYSCTLS: [(&str, &str); 6] = [
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
];
