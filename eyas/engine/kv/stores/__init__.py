"""Places behind host memory where pages outlive their worker: a disk's folder, a store that workers share."""
